"""The bytes that vLLM's own backends would move, by our formulas and by vLLM's code."""

from dataclasses import replace
from math import prod

import pytest
import torch

from checkpoint_convert import ModelShape, hf_tensors, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.vllm import EngineDims, engine_layouts
from helpers.models.tiny import servable_model
from helpers.models.shapes import LLAMA_70B, QWEN3_30B
from helpers.engines.vllm_workers import read_in_workers
from peer_bytes import m2n_elements, nccl_elements

LLAMA_8B = replace(
    LLAMA_70B, num_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=14336
)


def planned_by_vllm(model, folder, dims):
    """Elements of each tensor of the files that this worker would receive by `nccl_m2n`.

    With a destination mesh of (engines, workers of one), and with vLLM's default of (workers, 1).
    """
    tensors = hf_tensors(read_shape(folder))
    return [destined(model, tensors, dims.tensor, size) for size in (dims.tensor, 1)]


def destined(model, tensors, num_workers, shard_axis_size):
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    dtype = next(model.parameters()).dtype
    destinations = resolve_parameter_destinations(
        model,
        list(tensors),
        [dtype] * len(tensors),
        list(tensors.values()),
        num_workers=num_workers,
        shard_axis_size=shard_axis_size,
        allow_direct=True,
    )
    return {
        destination.name: destination.tensor.numel() if destination.direct else prod(size)
        for destination, size in zip(destinations, tensors.values(), strict=True)
    }


def num_mlps(shape: ModelShape) -> int:
    """Number of layers with a dense MLP or a shared expert."""
    has_shared = shape.moe is not None and shape.moe.shared_intermediate_size > 0
    return shape.num_layers if has_shared else shape.num_dense_layers


@pytest.mark.slow
def test_m2n_elements_equal_vllms_plan(tmp_path):
    cases = []
    # Fused matrices of weight files are left out: `nccl_m2n` sends every worker all their rows.
    for number, family in enumerate(n for n, f in FAMILIES.items() if not f.has_fused_weights):
        folder = servable_model(tmp_path / family, family, tied=number % 2 == 0)
        cases.append((folder, EngineDims(tensor=2)))
        if FAMILIES[family].experts is not None:
            cases.append((folder, EngineDims(tensor=2, expert_parallel=True)))
    for (folder, dims), workers in zip(
        cases, read_in_workers(cases, planned_by_vllm, "bfloat16"), strict=True
    ):
        shape = read_shape(folder)
        whole = nccl_elements(shape)
        for layout, (planned, by_default) in zip(engine_layouts(shape, dims), workers, strict=True):
            assert m2n_elements(shape, layout) == planned
            assert by_default == whole
            # vLLM took these workers for such as can be split.
            split = [name for name in whole if planned[name] < whole[name]]
            of_attention = 1 if shape.latent is None else 3
            assert len(split) == of_attention * shape.num_layers + num_mlps(shape)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "dims", "own", "nccl", "m2n"),
    [
        (LLAMA_8B, EngineDims(tensor=8), 2.01, 16.06, 11.83),
        (LLAMA_70B, EngineDims(tensor=8), 17.64, 141.11, 98.83),
        (LLAMA_70B, EngineDims(), 141.11, 141.11, 141.11),
        (QWEN3_30B, EngineDims(tensor=4), 15.29, 61.06, 60.46),
    ],
)
def test_gigabytes_per_worker(shape, dims, own, nccl, m2n):
    (worker, *_) = engine_layouts(shape, dims)
    elements = [
        sum(torch.Size(piece.box.size).numel() for piece in worker.pieces),
        sum(nccl_elements(shape).values()),
        sum(m2n_elements(shape, worker).values()),
    ]
    assert [round(2 * number / 1e9, 2) for number in elements] == [own, nccl, m2n]
