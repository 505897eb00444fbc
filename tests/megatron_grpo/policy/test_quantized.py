"""Which ranks send what of a quantised model: each worker of an engine gets its scales once. What
they export in a format that is never pushed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_convert.megatron import megatron_sender
from checkpoint_convert.quantized.model import quantized_engine_layouts, quantized_model
from checkpoint_convert.vllm import EngineDims, engine_layouts
from helpers.models.conversions import assert_same, weights_of
from helpers.models.quantized import nvfp4_weights
from helpers.models.shapes import DEEPSEEK_V3
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.export import export_model
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


def export(rank: int, folder: Path, out: Path, dims: ParallelDims) -> None:
    options = ("model.dtype=bfloat16", "train.export_quantization=nvfp4")
    policy, groups = start_policy(rank, folder, dims, *options)
    export_model(out, policy, tiny_config(folder, dims, *options), groups)


def test_ranks_export_the_nvfp4_of_compressed_tensors(tmp_path):
    dims = ParallelDims(tensor=2, expert=2, expert_tensor=1)
    model = tiny_model(tmp_path / "model", "qwen3_moe")
    run_ranks(dims.world_size, export, model, tmp_path / "out", dims)
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    assert_same(weights_of(tmp_path / "out"), nvfp4_weights(plain))
