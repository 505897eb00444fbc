"""Adapters with shared prompts, of fused layers and of a base in FP8: the numbers as without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy
from helpers.models.tiny import tiny_model
from helpers.oracle.adapters import (
    Boxes,
    boxes_of,
    gathered_gradients,
    options,
    set_b,
    take_step,
    whole,
)
from helpers.oracle.policies import LENGTHS, logprobs_of, pack_all, start_policy
from helpers.oracle.train_steps import BETA, BUDGETS, CLIPS, Case, OffPolicy, batches_of, config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import build_policy, unwrapped
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

TENSOR = ParallelDims(tensor=2)


def step_of_each(
    rank: int, configs: dict[str, Config], experience: OffPolicy
) -> dict[str, tuple[int, float, Boxes]]:
    """Number of tokens, loss and gradients by config."""
    setup_device(rank)
    found, groups = {}, init_groups(TENSOR)
    for name, cfg in configs.items():
        policy = build_policy(cfg, read_shape(cfg.model.path), groups)
        set_b(policy)
        batches = batches_of(policy, experience, cfg, groups)
        metrics = accumulate_gradient(policy, batches, cfg, groups, BETA)
        tokens, loss = sum(len(each.tokens) for each in batches), sum(map(float, metrics.losses))
        found[name] = tokens, loss, boxes_of(policy, gathered_gradients(policy))
    return found


@pytest.mark.long
def test_shared_prompts_change_neither_loss_nor_gradients_of_adapters(tmp_path):
    case = Case(tiny_model(tmp_path, "llama", tied=True), {}, {23: 4, 1: 2, 2: 2, 40: 4})
    recipe, given = {"loss_type": "dapo", **CLIPS}, options("llama")
    configs = {
        flag: config(
            case.folder, TENSOR, recipe, BUDGETS[-1], *given, f"grpo.shared_prompts={flag}"
        )
        for flag in ("true", "false")
    }
    ranks = run_ranks(2, step_of_each, configs, case.experience())
    for rank in ranks:
        (fewer, loss, _), (tokens, expected, _) = rank["true"], rank["false"]
        assert fewer < 0.9 * tokens
        assert loss == pytest.approx(expected, rel=1e-5)
    shared, gradients = (whole([rank[flag][2] for rank in ranks]) for flag in ("true", "false"))
    for name, gradient in gradients.items():
        assert float((shared[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def logprobs_of_fused(rank: int, folder: Path) -> list[dict[int, Tensor]]:
    """Before and after norms move into the layers behind them, as in Transformer Engine."""
    policy, groups = start_policy(rank, folder, ParallelDims(), *options("gemma3_text"))
    set_b(policy)
    batches = pack_all(LENGTHS, ParallelDims())
    found = [logprobs_of(policy, groups, batches)]
    for layer in unwrapped(policy.chunks[0]).decoder.layers:
        norm, qkv = layer.input_layernorm, layer.self_attention.linear_qkv
        layer.input_layernorm = IdentityOp()
        qkv.layer_norm_weight, qkv.eps = norm.weight, norm.eps
        qkv.zero_centered_gamma = norm.is_zero_centered
        qkv.forward = lambda x, norm=norm, multiply=qkv.forward: multiply(norm(x))
    return [*found, logprobs_of(policy, groups, batches)]


def test_adapters_of_layers_that_begin_with_a_norm_multiply_what_it_returns(tmp_path):
    """Its weights are 1 + those that are stored."""
    folder = tiny_model(tmp_path, "gemma3_text")
    ((apart, fused),) = run_ranks(1, logprobs_of_fused, folder)
    assert all(torch.equal(fused[index], logprobs) for index, logprobs in apart.items())


def numbers(rank: int, folder: Path, *overrides: str) -> dict[str, Any]:
    policy, groups = start_policy(rank, folder, TENSOR, *overrides)
    set_b(policy)
    logprobs = logprobs_of(policy, groups, pack_all(LENGTHS, TENSOR))
    take_step(policy, groups)
    adapters = boxes_of(policy, policy.adapters.parameters())
    return {"base": policy.adapters.base, "logprobs": logprobs, "adapters": adapters}


@pytest.mark.long
def test_a_base_in_fp8_is_its_dequantised_copy(tmp_path):
    """Tensor ranks cut inside of its blocks."""
    form = FORMATS["DeepSeek"]
    quantized = quantized_copy(tiny_model(tmp_path / "model", "llama"), tmp_path / "fp8", form)
    plain = dequantized_copy(quantized, tmp_path / "plain", form)
    found, expected = (
        run_ranks(2, numbers, folder, *options("llama")) for folder in (quantized, plain)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["base"] == theirs["base"]
        assert ours["logprobs"].keys() == theirs["logprobs"].keys()
        for index, logprobs in theirs["logprobs"].items():
            assert torch.equal(ours["logprobs"][index], logprobs)
        for (name, _, values), (_, _, own) in zip(
            theirs["adapters"], ours["adapters"], strict=True
        ):
            assert torch.equal(values, own), name
