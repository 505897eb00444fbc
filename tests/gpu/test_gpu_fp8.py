"""Layers that multiply in FP8: near bfloat16, independent of a sequence's place in the pack, and
within the planned memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_convert import ModelShape, read_shape
from helpers.models.tiny import mixture_of_blocks, tiny_model
from helpers.oracle.policies import (
    accumulate,
    pack_all,
    random_sequences,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.memory import rounded_weights, stages_memory
from megatron_grpo.planning.state import stage_states
from megatron_grpo.planning.workload import Job
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.router import with_own_layers
from parallel import ParallelDims

LENGTHS = [[(5, 90), (3, 60), (20, 44)], [(7, 41)]]
MULTIPLE = 16
SIMILAR = {"blockwise": 0.98, "tensorwise": 0.97}
"""Least cosine between gradients in FP8 and in bfloat16. Three bits of mantissa round by 3 % in
root mean square; the gradient of a layer has been through some ten such products."""


def numbers(
    rank: int, folder: Path, dims: ParallelDims, lengths: list[list[tuple[int, int]]], *given: str
) -> tuple[Tensor, Tensor, bool]:
    """Log-probabilities of responses, the gradient, and whether a linear layer was in FP8."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    policy, groups = start_policy(rank, folder, dims, "model.dtype=bfloat16", *given)
    seen = []
    for module in policy.chunks[0].modules():
        if type(module).__name__.startswith("TE") and "Linear" in type(module).__name__:
            hook = lambda *_: seen.append(FP8GlobalStateManager.is_fp8_enabled())  # noqa: E731
            module.register_forward_hook(hook)
    shape = read_shape(folder)
    routes = random_routes(lengths, shape) if shape.moe else None
    batches = pack_all(lengths, dims, routes, multiple=MULTIPLE)
    if routes:
        batches = [with_own_layers(batch, groups) for batch in batches]
    share = [batch.to("cuda") for batch in batches]
    values = compute_logprobs(policy, share, 1.0, groups)
    accumulate(policy, groups, share)
    trained = [each for each in policy.parameters().values() if each.requires_grad]
    gradient = torch.cat([each.main_grad.flatten().double().cpu() for each in trained])
    chosen = [whole[batch.loss_mask] for batch, (whole, _) in zip(share, values, strict=True)]
    return torch.cat(chosen).cpu(), gradient, any(seen)


def random_routes(lengths: list[list[tuple[int, int]]], shape: ModelShape) -> list[Tensor]:
    """Experts for both dtypes, since rounding flips a router's choice."""
    generator, moe = torch.Generator().manual_seed(1), shape.moe
    return [
        torch.rand(len(each.tokens) - 1, shape.num_layers, moe.num_experts, generator=generator)
        .topk(moe.experts_per_token)
        .indices.to(torch.uint8)
        for each in random_sequences(lengths)
    ]


def run(folder, lengths, *given):
    if read_shape(folder).moe:
        given = ("rollout.router_replay=true", *given)
    [found] = run_ranks(1, numbers, folder, ParallelDims(), lengths, *given, cuda=True, timeout=240)
    return found


def in_fp8(recipe: str, *given: str) -> list[str]:
    return ["model.megatron.fp8=e4m3", f"model.megatron.fp8_recipe={recipe}", *given]


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3_moe", "deepseek_v3"],
    ids=["dense", "mixture", "latents"],
)
def folder(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("model") / "model"
    if request.param == "qwen3":
        return tiny_model(where, "qwen3", hidden_size=256, intermediate_size=512, head_dim=64)
    return mixture_of_blocks(where, request.param)


@pytest.mark.parametrize("recipe", list(SIMILAR))
def test_fp8_is_near_bfloat16(folder, recipe):
    plain, plain_gradient, was_fp8 = run(folder, LENGTHS)
    assert not was_fp8
    logprobs, gradient, was_fp8 = run(folder, LENGTHS, *in_fp8(recipe))
    assert was_fp8
    gap = (logprobs - plain).abs().mean().item()
    cosine = torch.nn.functional.cosine_similarity(gradient, plain_gradient, dim=0).item()
    print(folder, recipe, f"gap {gap:.4f}, cosine {cosine:.5f}")
    assert 0 < gap < 0.1
    assert cosine > SIMILAR[recipe]


def test_block_scales_keep_a_sequence_independent_of_its_place(tmp_path):
    """Each scale of activations belongs to 128 numbers of one token."""
    folder = tiny_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=512, head_dim=64)
    together, _, _ = run(folder, [[(5, 90), (3, 60), (20, 44)]], *in_fp8("blockwise"))
    alone, _, _ = run(folder, [[(5, 90)], [(3, 60)], [(20, 44)]], *in_fp8("blockwise"))
    plain, _, _ = run(folder, [[(5, 90)], [(3, 60)], [(20, 44)]])
    moved, rounded = ((x - alone).abs().mean().item() for x in (together, plain))
    print(f"differences: {moved:.5f} by the microbatch, {rounded:.5f} by FP8")
    # Attention sums in another order, so that a few activations round the other way.
    assert moved < rounded / 3


FULL = ["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"]
NORMS = ["recompute_granularity=selective", "recompute_modules=[layernorm]"]
LEAVING = [
    "fine_grained_activation_offloading=true",
    "offload_modules=[qkv_linear,attn_proj]",
    "min_offloaded_tensor_size=0",
]


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3", FULL), ("qwen3", LEAVING), ("deepseek_v3", NORMS), ("deepseek_v3", FULL)],
    ids=["recomputed", "offloaded", "norms of latents", "recomputed latents"],
)
def test_recomputation_and_offload_change_nothing(family, fields, tmp_path):
    if family == "qwen3":
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        folder = tiny_model(tmp_path / "model", "qwen3", **sizes)
    else:
        folder = mixture_of_blocks(tmp_path / "model", family)
    _, plain, _ = run(folder, LENGTHS, *in_fp8("blockwise"))
    again = [f"model.megatron.{field}" for field in fields]
    _, found, _ = run(folder, LENGTHS, *in_fp8("blockwise", *again))
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-4 * plain.abs().max().item())


def test_the_first_and_the_last_layers_can_stay_in_bfloat16(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=512, head_dim=64)
    ends = ["first_last_layers_bf16=true", "num_layers_at_start_in_bf16=1"]
    ends.append("num_layers_at_end_in_bf16=1")
    *_, was_fp8 = run(folder, LENGTHS, *in_fp8("blockwise", *(f"model.megatron.{e}" for e in ends)))
    assert not was_fp8  # this model has two layers


LONG = [[(256, 256)] * count for count in (8, 5, 7)]
WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
BEFORE = ["model.dtype=bfloat16", "train.max_tokens_per_microbatch=4096", "grpo.beta=0"]


def num_quantized(policy) -> int:
    """Weights in FP8 that Transformer Engine's layers hold."""
    modules = policy.chunks[0].modules()
    return sum(len(getattr(module, "_fp8_workspaces", ())) for module in modules)


def peak_bytes(rank: int, folder: Path, *given: str) -> tuple[int, list[int]]:
    """Peak bytes of a schedule's tensors above the memory in use before, and numbers of FP8 weights
    in its last layer, after a forward-only pass, and after a pass with gradients."""
    policy, groups = start_policy(rank, folder, ParallelDims(), *BEFORE, *given)
    batches = [batch.to("cuda:0") for batch in pack_all(LONG, ParallelDims(), multiple=MULTIPLE)]
    held: list[int] = []
    last = [m for m in policy.chunks[0].modules() if type(m).__name__ == "TERowParallelLinear"][-1]
    handle = last.register_forward_hook(lambda *_: held.append(num_quantized(policy)))
    compute_logprobs(policy, batches, 1.0, groups)
    handle.remove()
    held = [max(held), num_quantized(policy)]
    accumulate(policy, groups, batches)
    held.append(num_quantized(policy))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accumulate(policy, groups, batches)
    return torch.cuda.max_memory_allocated() - before, held


@pytest.mark.parametrize("recipe", list(SIMILAR))
def test_a_pass_takes_the_planned_memory_and_leaves_no_fp8_weights(recipe, tmp_path):
    folder = tiny_model(tmp_path, "qwen3", **WIDE)
    given = in_fp8(recipe)
    [(peak, held)] = run_ranks(1, peak_bytes, folder, *given, cuda=True, timeout=240)
    assert held == [4 * WIDE["num_hidden_layers"], 0, 0]
    cfg, shape = tiny_config(folder, ParallelDims(), *BEFORE, *given), read_shape(folder)
    job = Job(cfg, shape, CARDS["h100"], LONG)
    [stage] = stages_memory(job, list(stage_states(cfg, shape)), len(LONG), None)
    weights = rounded_weights(cfg, shape, 0, backward=True)
    planned = stage.phases["train"]
    print(
        f"{recipe}: {peak / 1e6:.0f} MB, {planned / 1e6:.0f} planned, {weights / 1e6:.0f} weights"
    )
    assert weights > 0.1 * planned  # else the check would prove nothing
    assert peak == pytest.approx(planned, rel=0.1)
