"""A run that trains on the generations of another is that run."""

import json
from pathlib import Path

import pytest

from demo.make_sums import sums
from helpers.engines.live import TestEngine
from helpers.runs.jobs import Job
from helpers.runs.train import read_completions, results


@pytest.mark.long
@pytest.mark.parametrize(
    "is_async",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["synchronous", "asynchronous"],
)
def test_a_replayed_run_has_the_same_bits_and_no_engines(
    tied_model: Path, reference_engine: TestEngine, tmp_path: Path, is_async: bool
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    arguments = [
        f"model.path={tied_model}",
        f"data.path={data}",
        f"rollout.async_generate={str(is_async).lower()}",
        "grpo.rollout_importance_sampling_mode=token_truncate",
        "grpo.dynamic_sample=true",
        "grpo.steps_per_generation=2",
        "train.num_steps=4",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
    ]
    dumped, replayed = tmp_path / "dumped", tmp_path / "replayed"
    address = f"rollout.base_urls=[{reference_engine.servers.base_urls[0]}]"
    for run_dir, own in (
        (dumped, [address, "train.save_generations=true"]),
        (replayed, [f"train.replay={dumped}"]),
    ):
        with Job(
            [*arguments, f"train.run_dir={run_dir}", *own],
            1,
            tmp_path / "logs_of_ranks",
            token=reference_engine.servers.token,
        ) as job:
            ended = job.end(120)
        assert ended.exit_codes == [0], ended.output
    assert results(replayed) == results(dumped) and len(results(dumped)) == 4
    assert read_completions(replayed) == read_completions(dumped)
    weights = [
        (run_dir / "hf" / "model.safetensors").read_bytes() for run_dir in (dumped, replayed)
    ]
    assert weights[0] == weights[1]
    assert not [*replayed.glob("logs/engine_*")]
