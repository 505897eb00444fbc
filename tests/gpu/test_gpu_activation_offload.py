"""Activations offloaded to the host, on CUDA: the same gradients, and less GPU memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    Lengths,
    accumulate,
    gradient_boxes,
    pack_all,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.planning.activations import layer_bytes
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.policy.forward import compute_logprobs
from parallel import ParallelDims

LENGTHS = [[(5, 32), (3, 9), (20, 44)], [(7, 41)], [(9, 7), (9, 7)], [(6, 30)]]
SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
MODULES = {"qwen3": ATTENTION, "qwen3_moe": [*ATTENTION, "mlp_norm", "expert_fc1", "moe_act"]}
ALL_SIZES = "model.megatron.min_offloaded_tensor_size=0"


def offloaded(modules: list[str], *further: str) -> list[str]:
    return [
        "model.megatron.fine_grained_activation_offloading=true",
        f"model.megatron.offload_modules=[{','.join(modules)}]",
        *further,
    ]


def gradients(rank: int, folder: Path, dims: ParallelDims, overrides: list[str]) -> list[Tensor]:
    """Gradients by schedules of several numbers of microbatches, each after a forward-only one."""
    policy, groups = start_policy(rank, folder, dims, "model.dtype=bfloat16", *overrides)
    shared = "grpo.shared_prompts=true" in overrides
    share = [
        batch.to(f"cuda:{torch.cuda.current_device()}")
        for batch in pack_all(LENGTHS, dims, share_prompts=shared)
    ]
    seen = []
    for count in 2, 4, 2:
        compute_logprobs(policy, share, 1.0, groups)
        accumulate(policy, groups, share[:count])
        seen += [values.cpu() for _, _, values in gradient_boxes(policy)]
    return seen


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize(
    ("dims", "shared"),
    [
        (ParallelDims(), []),
        (ParallelDims(), ["grpo.shared_prompts=true"]),
        (ParallelDims(pipeline=2, virtual_pipeline=2), []),
        (ParallelDims(tensor=2), []),
        (ParallelDims(context=2), []),
    ],
    ids=str,
)
def test_gradients_differ_only_by_the_order_of_sums(family, dims, shared, tmp_path):
    """Attention's backward sums the gradient of queries in the order in which its blocks end."""
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    experts = {"moe_intermediate_size": 128} if "moe" in family else {}
    folder = tiny_model(tmp_path, family, **SHAPE, **experts)
    plain, moved = (
        run_ranks(dims.world_size, gradients, folder, dims, overrides, cuda=True, timeout=390)
        for overrides in (shared, [*shared, *offloaded(MODULES[family], ALL_SIZES)])
    )
    for one, other in zip(plain, moved, strict=True):
        for expected, values in zip(one, other, strict=True):
            assert (values - expected).norm() <= 2e-2 * expected.norm()


LONG: Lengths = [[(256, 256)] * count for count in (32, 20, 28)]
TOKENS = 32 * 512
WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}


def peak_bytes(rank: int, folder: Path, overrides: list[str]) -> int:
    """Peak bytes of a schedule's tensors above the memory in use before."""
    dims = ParallelDims()
    policy, groups = start_policy(rank, folder, dims, "model.dtype=bfloat16", *overrides)
    batches = [batch.to("cuda:0") for batch in pack_all(LONG, dims)]
    accumulate(policy, groups, batches)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accumulate(policy, groups, batches)
    return torch.cuda.max_memory_allocated() - before


def test_offloaded_activations_free_the_planned_memory(tmp_path):
    folder, overrides = tiny_model(tmp_path, "llama", **WIDE), offloaded(ATTENTION)
    [plain] = run_ranks(1, peak_bytes, folder, [], cuda=True, timeout=390)
    [moved] = run_ranks(1, peak_bytes, folder, overrides, cuda=True, timeout=390)
    cfg = tiny_config(folder, ParallelDims(), "model.dtype=bfloat16", *overrides)
    [kind] = layer_kinds(read_shape(folder))
    layer_size = TOKENS * layer_bytes(cfg, kind).offloaded
    print(
        f"peak {plain / 1e9:.2f} GB, with offload {moved / 1e9:.2f}, layer {layer_size / 1e9:.3f}"
    )
    # Two layers' activations are there: one that is leaving and the last that has left.
    assert plain - moved > 0.8 * (WIDE["num_hidden_layers"] - 2) * layer_size
