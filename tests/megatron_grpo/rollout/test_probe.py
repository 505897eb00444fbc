"""Before the first rollout, engines and trainer must agree on what their weights compute."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.shard import quantized_tensors
from demo.make_sums import sums
from helpers.engines.live import running_engine, served_model
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, random_sequences, sequence_logprobs, tiny_config
from helpers.ranks.processes import run_ranks
from helpers.runs.rewards import sample_of
from helpers.runs.train import finish_run
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import Preparation
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.policy.model import build_policy
from megatron_grpo.rollout.probe import probe_logprobs
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.microbatches import CostModel

LONGEST = 2
"""The sample with other log-probabilities in the engine; one of two data ranks has it."""


def experience(logprobs: list[torch.Tensor], gap: float) -> Experience:
    """Samples of an engine; the longest has log-probabilities off by `gap`, up and down in turn."""
    samples = []
    for i, (sequence, exact) in enumerate(zip(random_sequences(LENGTHS), logprobs, strict=True)):
        signs = torch.tensor([1.0, -1.0]).repeat(len(exact))[: len(exact)]
        shifted = exact + gap * signs if i == LONGEST else exact
        prompt, completion = sequence.tokens.tensor_split([sequence.num_prompt_tokens])
        prompt = Prompt(index=i, token_ids=tuple(prompt.tolist()), text="", row={})
        tokens = {"completion_ids": completion.tolist(), "logprobs": shifted.tolist()}
        samples.append(sample_of("", {}, prompt=prompt, **tokens))
    nothing = torch.zeros(len(samples), dtype=torch.float64)
    return Experience(samples, [], nothing, nothing.long(), nothing)


def probes(
    rank: int, folder: Path, dims: ParallelDims, logprobs: list[torch.Tensor], cases: list
) -> list[dict[str, float] | str]:
    """Probe results of `cases`, each a gap and overrides: metrics or the error. Weights stay."""
    device, groups, found = setup_device(rank), init_groups(dims), []
    batch = [f"grpo.generation_batch_size={len(logprobs)}", "grpo.num_generations=2"]
    for gap, *overrides in cases:
        cfg = tiny_config(folder, dims, *batch, *overrides)
        policy, cost = build_policy(cfg, read_shape(folder), groups), CostModel.transformer(64)
        before = {name: value.clone() for name, value in policy.parameters().items()}
        mine = experience(logprobs, gap) if rank == 0 else None
        try:
            found.append(probe_logprobs(mine, Preparation(policy, None, cost, cfg, groups, device)))
        except ValueError as refused:
            found.append(str(refused))
        parameters = policy.parameters()
        assert all(torch.equal(before[name], value) for name, value in parameters.items())
    return found


def test_probe_logprobs_refuses_more_than_rounding(tmp_path):
    """In bfloat16 the bound is for the gap beyond its own rounding of about 0.01."""
    folder = tiny_model(tmp_path, "qwen3")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logprobs = sequence_logprobs(model, LENGTHS)
    share = len(logprobs[LONGEST]) / sum(map(len, logprobs))
    cases = [(gap, "model.dtype=float32") for gap in (0.0, 0.03, 0.04, math.nan)]
    cases += [(mean / share, "model.dtype=bfloat16") for mean in (0.1, 0.2)]
    first, second = run_ranks(2, probes, folder, ParallelDims(data=2), logprobs, cases)
    for mean, found in zip([0.0, 0.03 * share, 0.04 * share], second, strict=False):
        assert found["probe/logprob_gap_mean"] == pytest.approx(mean, abs=1e-5)
    assert second[1]["probe/logprob_gap_max"] == pytest.approx(0.03, abs=1e-4)
    assert second[4]["probe/logprob_gap_mean"] == pytest.approx(0.1, abs=0.03)
    assert first[:2] == second[:2] and first[4] == second[4]
    for refused, dtype in ((first[2], "float32"), (first[3], "float32"), (first[5], "bfloat16")):
        assert "engines and trainer do not compute the same model: over 6 samples" in refused
        assert f"and rounding in {dtype} explains at most" in refused
    assert "differ by 0.0126 on average, and rounding in float32 explains at most 0.01" in first[2]


def test_probe_logprobs_quantises_weights_as_engines(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    tensors = dict(quantized_tensors(folder, "fp8_channel"))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, value in model.named_parameters():
            if (scale := tensors.get(f"{name}_scale")) is not None:
                value.copy_(tensors[name].float() * scale)
        logprobs = sequence_logprobs(model, LENGTHS)
    options = "model.dtype=bfloat16", "rollout.quantization=fp8_channel"
    cases = [
        (0.0, *options, "grpo.rollout_importance_sampling_mode=token_truncate"),
        (0.0, *options, "rollout.max_quantization_gap=1"),
        (0.0, *options, "rollout.max_quantization_gap=0.01"),
        (9.0, *options, "rollout.max_quantization_gap=9"),  # the engine has another model
    ]
    found, _ = run_ranks(2, probes, folder, ParallelDims(tensor=2), logprobs, cases)
    corrected, within, refused, of_another = found
    assert corrected == within
    assert within["probe/quantized_logprob_gap_mean"] < within["probe/logprob_gap_mean"] / 2
    assert "log-probabilities of engines and trainer differ by 0.0" in refused
    assert "0.01 may stay uncorrected: set grpo.rollout_importance_sampling" in refused
    assert "and rounding in fp8_channel and bfloat16 explains at most 0.6" in of_another


@pytest.mark.slow
def test_run_refuses_an_engine_with_another_rope(tied_model, tmp_path):
    """Its weights are right to the bit, and its log-probabilities are wrong."""
    other = served_model(tmp_path / "model", "qwen3", tied=True)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (other / "config.json").write_text(json.dumps(config))
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    with running_engine("reference", other, tmp_path) as engine:
        run = finish_run(
            f"model.path={tied_model}",
            f"data.path={data}",
            "train.num_steps=1",
            "parallel.tensor_parallel_size=2",
            f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
            f"train.run_dir={tmp_path / 'run'}",
            token=engine.servers.token,
        )
    assert run.exit_code != 0
    assert "engines and trainer do not compute the same model" in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "run" / "completions.jsonl").read_text()
