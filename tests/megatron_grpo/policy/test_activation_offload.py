"""Activations that wait for their backward on the host: what leaves, and that it comes back."""

from pathlib import Path

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    gradient_boxes,
    layout_name,
    pack_all,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.planning.activations import layer_bytes
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import forward
from parallel import ParallelDims

MODULES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


def offload(modules: list[str]) -> list[str]:
    return [
        "model.megatron.fine_grained_activation_offloading=true",
        f"model.megatron.offload_modules=[{','.join(modules)}]",
        "model.megatron.min_offloaded_tensor_size=0",
    ]


BFLOAT16 = ["model.dtype=bfloat16", "model.megatron.transformer_impl=local"]


def gradients(
    rank: int, folder: Path, dims: ParallelDims, overrides: list[str]
) -> dict[int, list[Tensor]]:
    """Gradients by number of microbatches, each schedule after one without gradients."""
    policy, groups = start_policy(rank, folder, dims, *overrides)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    seen = {}
    for count in dims.pipeline, len(share), dims.pipeline:
        compute_logprobs(policy, share, 1.0, groups)
        accumulate(policy, groups, share[:count])
        seen[count] = [values for _, _, values in gradient_boxes(policy)]
    return seen


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pipeline=2, virtual_pipeline=2),
        pytest.param(ParallelDims(tensor=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(context=2), marks=pytest.mark.slow),
    ],
    ids=layout_name,
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_are_the_same_bit_for_bit(family, dims, tmp_path):
    """Without mlp_norm: Megatron's mark adds up gradients of its input in another order."""
    folder = tiny_model(tmp_path, family, num_hidden_layers=4)
    plain, offloaded = (
        run_ranks(dims.world_size, gradients, folder, dims, overrides, timeout=120)
        for overrides in ([], offload(MODULES[:-1]))
    )
    for one, other in zip(plain, offloaded, strict=True):
        assert one.keys() == other.keys()
        for count, values in one.items():
            assert all(map(torch.equal, values, other[count]))


def moved(rank: int, folder: Path) -> tuple[int, int, list[bool]]:
    """Host bytes after a forward, number of tokens, and by module: is it on the device, too?"""
    policy, groups = start_policy(rank, folder, ParallelDims(), *offload(MODULES), *BFLOAT16)
    [batch] = pack_all(LENGTHS[:1], groups.dims)
    batch = batch.on_rank(groups.dims, groups.coordinates)
    states = forward(policy.chunks[0], batch, groups)
    assert states.requires_grad  # keeps the graph alive
    left = PipelineOffloadManager.get_instance().cur_forward_chunk().groups
    blocks = {block for group in left for block in group.blocks}
    on_device = [all(block.values is not None for block in group.blocks) for group in left]
    return sum(len(block.host) for block in blocks), len(batch.tokens), on_device


def test_planned_bytes_are_on_the_host_and_the_newest_layers_also_on_the_device(tmp_path):
    folder = tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=3)
    [(num_bytes, tokens, on_device)] = run_ranks(1, moved, folder)
    cfg = tiny_config(folder, ParallelDims(), *offload(MODULES), *BFLOAT16)
    [kind] = layer_kinds(read_shape(folder))
    planned = layer_bytes(cfg, kind)
    assert num_bytes == pytest.approx(3 * tokens * planned.offloaded, rel=0.01)
    assert on_device == 2 * len(MODULES) * [False] + len(MODULES) * [True]
