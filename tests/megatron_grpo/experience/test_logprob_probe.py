"""Before the first rollout, engines and trainer must agree on what their weights compute."""

import json
from pathlib import Path

import pytest

from demo.make_sums import sums
from engines import TestEngine, running_engine, served_model
from runs import Finished, finish_run, read_metrics


def run_one_step(model: Path, engine: TestEngine, folder: Path) -> Finished:
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    return finish_run(
        f"model.path={model}",
        f"data.path={data}",
        "train.num_steps=1",
        "parallel.tensor_parallel_size=2",
        "rollout.engine=transformers",
        f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
        f"train.run_dir={folder / 'run'}",
        token=engine.servers.token,
    )


@pytest.mark.slow
def test_the_gap_is_a_metric_of_the_first_step(tied_model, transformers_engine, tmp_path):
    run = run_one_step(tied_model, transformers_engine, tmp_path)
    assert run.exit_code == 0, run.output
    [record] = read_metrics(tmp_path / "run")
    assert 0 < record["probe/logprob_gap_mean"] < record["probe/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_an_engine_that_turns_heads_otherwise_is_refused_before_the_first_rollout(
    tied_model, tmp_path
):
    """Its weights are right to the bit, and its log-probabilities are wrong."""
    other = served_model(tmp_path / "model", "qwen3", tied=True)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (other / "config.json").write_text(json.dumps(config))
    with running_engine("transformers", other, tmp_path) as engine:
        run = run_one_step(tied_model, engine, tmp_path)
    assert run.exit_code != 0
    assert "engines and trainer do not compute the same model" in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "run" / "completions.jsonl").read_text()


@pytest.mark.slow
def test_an_engine_of_another_model_is_refused_with_the_names_of_its_parameters(
    tied_model, tmp_path
):
    other = served_model(tmp_path / "model", "qwen2", tied=True)
    with running_engine("transformers", other, tmp_path) as engine:
        run = run_one_step(tied_model, engine, tmp_path)
    assert run.exit_code != 0
    url = engine.servers.base_urls[0]
    assert f"rollout engine {url}: the engine's parameters are not those" in run.output
    assert "model.layers.1.self_attn.q_proj.bias [128] is filled by no weight" in run.output
