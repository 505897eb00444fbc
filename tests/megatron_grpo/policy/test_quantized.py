"""Which ranks send what of a quantised model: each worker of an engine gets its scales once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_convert.megatron import megatron_sender
from checkpoint_convert.quantized_model import quantized_model
from checkpoint_convert.vllm import EngineDims, engine_layouts
from checkpoint_convert.vllm_quantized import quantized_engine_layouts
from helpers.shapes import DEEPSEEK_V3
from megatron_grpo.policy.quantized import quantized_sender
from parallel import ParallelDims, Sender
from parallel.reshard import check_push

SHAPE = replace(
    DEEPSEEK_V3, num_layers=2, moe=replace(DEEPSEEK_V3.moe, num_dense_layers=1, num_experts=8)
)
MODEL = quantized_model("fp8", SHAPE, "BF16")


def sender(dims: ParallelDims, rank: int) -> Sender:
    at = dims.coordinates(rank)
    groups: Any = SimpleNamespace(dims=dims, coordinates=at)
    assert MODEL is not None
    plain = megatron_sender(SHAPE, dims, at, transformer_engine=True)
    return quantized_sender(plain, MODEL, groups)


@pytest.mark.parametrize(
    "engine", [EngineDims(tensor=4), EngineDims(tensor=2, data=2, expert_parallel=True)], ids=str
)
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(data=2, expert=2),
        ParallelDims(tensor=2, data=2, expert=2, pipeline=2),
        ParallelDims(tensor=4, data=2, expert=4, expert_tensor=1),
    ],
    ids=str,
)
def test_every_scale_reaches_each_worker_once(dims, engine):
    plain = engine_layouts(SHAPE, engine)
    workers = quantized_engine_layouts(plain, SHAPE, engine, MODEL)
    senders = [sender(dims, rank) for rank in range(dims.world_size)]
    assert check_push(senders, workers)
    for each in senders:  # those who would send are those who hold
        held = {piece.tensor for piece in each.layout.pieces}
        for name, size in MODEL.matrices.items():
            assert size and (MODEL.scale_name(name) in held) == (name in held), name
