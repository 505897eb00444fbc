"""Quantised policies: each worker of an engine gets its scales once; exports; and resumption of
rounding training. Rows of test_model.py have its numbers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_convert.megatron import megatron_sender
from checkpoint_convert.quantized.model import quantized_engine_layouts, quantized_model
from checkpoint_convert.vllm import EngineDims, engine_layouts
from checkpoint_convert.weights import whole_tensors
from helpers.models.conversions import assert_same, weights_of
from helpers.models.quantized import nvfp4_weights
from helpers.models.shapes import DEEPSEEK_V3
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    Boxes,
    assert_equal_tensors,
    boxes_of,
    checkpoints_of,
    save_checkpoint,
    start_policy,
    take_step,
    tiny_config,
    whole,
)
from helpers.oracle.quantization import Quantized, aware_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.engine_weights.checksums import pushed_weights
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.quantized import quantized_sender
from parallel import ParallelDims, Sender
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.reshard import check_push

SHAPE = replace(
    DEEPSEEK_V3, num_layers=2, moe=replace(DEEPSEEK_V3.moe, dense_layers=(0,), num_experts=8)
)
MODEL = quantized_model("fp8", SHAPE, "BF16")

NVFP4 = "train.export_quantization=nvfp4", "rollout.quantization_aware=true"


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
    for each in senders:  # the senders of a scale are its holders
        held = {piece.tensor for piece in each.layout.pieces}
        for name, size in MODEL.matrices.items():
            assert size and (MODEL.scale_name(name) in held) == (name in held), name


def export(rank: int, folder: Path, out: Path, dims: ParallelDims) -> tuple[Boxes, Boxes]:
    """Export in NVFP4; returns the weights of the passes and of a push."""
    options = ("model.dtype=bfloat16", *NVFP4)
    policy, groups = start_policy(rank, folder, dims, *options)
    cfg = tiny_config(folder, dims, *options)
    export_model(out, policy, cfg, groups)
    with policy.computing():
        computed = boxes_of(policy, policy.parameters())
    return computed, boxes_of(policy, pushed_weights(policy, cfg, groups))


def test_ranks_export_nvfp4_and_compute_and_push_what_is_read_back(tmp_path):
    """The format is that of compressed-tensors."""
    dims = ParallelDims(tensor=2, expert=2, expert_tensor=1)
    model, out = tiny_model(tmp_path / "model", "qwen3_moe"), tmp_path / "out"
    ranks = run_ranks(dims.world_size, export, model, out, dims)
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    assert_same(weights_of(out), nvfp4_weights(plain))
    for boxes in zip(*ranks, strict=True):
        assert_equal_tensors(whole(boxes), dict(whole_tensors(out)))


def weights_in_run(rank: int, run: Path, folder: Path, dims: ParallelDims) -> tuple[Boxes, Boxes]:
    """Weights after a first step, or as loaded, and the weights that the forward then uses."""
    setup_device(rank)
    groups = init_groups(dims)
    policy = aware_policy("int8", tiny_config(folder, dims, *Quantized.overrides), groups)
    if run.exists():
        checkpoints_of(run, policy, folder, dims).load()
    else:
        take_step(policy, groups)
        save_checkpoint(run, 1, policy, folder, dims)
    with policy.computing():
        computed = boxes_of(policy, policy.parameters())
    return boxes_of(policy, policy.parameters()), computed


@pytest.mark.long
def test_quantized_policy_resumes_at_another_layout_bit_for_bit(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3", tied=True)
    saved, resumed = (
        run_ranks(2, weights_in_run, tmp_path / "run", folder, dims)
        for dims in (ParallelDims(tensor=2), ParallelDims(pipeline=2))
    )
    for before, after in zip(zip(*saved, strict=True), zip(*resumed, strict=True), strict=True):
        assert_equal_tensors(whole(after), whole(before))
