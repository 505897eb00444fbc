"""A whole run whose engine drafts with the layer for multi-token prediction that it trains."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from demo.make_sums import sums
from helpers.engines.live import kernels_for, served_model
from helpers.models.tiny import add_mtp_layer
from helpers.runs.train import finish_run, read_metrics

NUM_STEPS = 4


def decided_model(folder: Path) -> Path:
    """A model whose samples follow from the last tokens more than that of random weights."""
    served_model(folder, "glm4_moe", tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 50
    weights["lm_head.weight"][4:12] *= 5
    weights["lm_head.weight"][12:] *= 0.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.long
def test_engines_take_more_drafts_as_the_layer_is_trained(tmp_path: Path) -> None:
    model = add_mtp_layer(decided_model(tmp_path / "model"), norm=1.0)
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums())))
    run_dir = tmp_path / "run"
    with kernels_for(model):
        ended = finish_run(
            f"model.path={model}",
            "model.mtp_num_layers=1",
            f"data.path={tmp_path / 'sums.jsonl'}",
            f"train.run_dir={run_dir}",
            f"train.num_steps={NUM_STEPS}",
            *[f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")],
            "optimizer.lr=3e-3",
            "optimizer.lr_warmup_steps=0",
            "grpo.generation_batch_size=32",
            "rollout.max_completion_length=48",
            "rollout.vllm={speculative_config: {method: mtp, num_speculative_tokens: 1}}",
        )
    assert ended.exit_code == 0, ended.output
    records = read_metrics(run_dir)
    rates = [record["rollout/acceptance_rate/1"] for record in records]
    losses = [record["mtp/loss"] for record in records]
    assert rates[-1] > 2 * rates[0] > 0, rates
    assert losses == sorted(losses, reverse=True)
    # Samples are the policy's, whatever was drafted.
    assert max(record["rollout/logprob_gap_max"] for record in records) < 1e-3
    source, trained = (load_file(at / "model.safetensors") for at in (model, run_dir / "hf"))
    name = "model.layers.3.eh_proj.weight"
    assert not source[name].equal(trained[name])
