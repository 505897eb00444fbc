"""Keys of `optimizer` that save memory: same updates, and checkpoints that all of them can load.

Where they need a GPU, `helpers/oracle/optimizers.py` stands in for it;
`tests/gpu/test_gpu_optimizer.py` has a real one.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.optimizers import (
    Whole,
    assert_same,
    changes,
    largest_error,
    load_and_save,
    save_during_a_step,
    start_kind,
    train_and_save,
    wholes,
)
from helpers.oracle.policies import LENGTHS, accumulate, gradient_boxes, pack_all
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy.optimizer import check_optimizer, gradient_norm
from megatron_grpo.policy.optimizer_state import SplitFloats
from parallel import Box, ParallelDims

TENSOR_PIPELINE = ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", tied=True)


def summed(
    rank: int, folder: Path, dims: ParallelDims, kind: str
) -> tuple[float, list[tuple[str, Box, Tensor]]]:
    """Norm and boxes of the gradient."""
    policy, groups = start_kind(rank, folder, dims, kind)
    accumulate(policy, groups, pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data])
    norm = gradient_norm(policy.optimizer)
    return norm, gradient_boxes(policy)


@pytest.mark.long
@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(ParallelDims(), marks=pytest.mark.slow),
        pytest.param(ParallelDims(data=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(context=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(tensor=2), marks=pytest.mark.slow),
        TENSOR_PIPELINE,
        ParallelDims(data=4),
    ],
    ids=str,
)
def test_gradients_added_up_in_bfloat16_are_rounded_once_per_sum(folder, dims):
    # A sum rounds by at most 2^-9 of itself. An element has one for every microbatch, rank and use
    # of a tied embedding: at most 8 here, in which errors are independent.
    bound = 2**-9 * 8**0.5
    exact, short = (
        run_ranks(dims.world_size, summed, folder, dims, kind)
        for kind in ("float32", "short gradients")
    )
    for (norm, boxes), (short_norm, short_boxes) in zip(exact, short, strict=True):
        assert short_norm == pytest.approx(norm, rel=bound)
        for (name, _, gradient), (_, _, rounded) in zip(boxes, short_boxes, strict=True):
            assert (gradient.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
            error = float((rounded.float() - gradient).norm() / gradient.norm())
            assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.long
@pytest.mark.parametrize(
    "dims", [pytest.param(ParallelDims(data=2), marks=pytest.mark.slow), TENSOR_PIPELINE], ids=str
)
def test_master_weights_are_updated_as_by_default(folder, dims):
    def error(kind: str, expected: Whole) -> float:
        return largest_error(changes(folder, dims, kind), expected)

    plain = changes(folder, dims, "float32")
    for kind in ("precise", "host", "half on the host"):
        assert error(kind, plain) < 1e-5, kind
    # Gradients are clipped in bfloat16, which rounds each by at most 2^-9 of itself; moments, in
    # each update, too.
    short = changes(folder, dims, "short gradients")
    for kind in ("precise, short gradients", "half on the host, short gradients"):
        assert error(kind, short) < 2**-9, kind
    assert 1e-4 < error("precise, short moments", short) < 2**-8


EXPERTS = ParallelDims(data=2, expert=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("precise, short moments", marks=pytest.mark.slow),
        "half on the host",
        pytest.param("short gradients", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_at_any_layout_and_in_any_kind_of_optimizer(mixture, tmp_path, kind):
    """Each layout and kind loads the checkpoint of the one before."""
    run = tmp_path / "run"
    saved, after = wholes(run_ranks(2, train_and_save, mixture, EXPERTS, kind, run))
    others = [
        (kind, EXPERTS),
        (kind, ParallelDims(tensor=2, pipeline=2)),
        ("float32", ParallelDims(data=2)),
        ("precise", ParallelDims(tensor=2, expert=2, expert_tensor=1)),
        ("host", ParallelDims(pipeline=2)),
        (kind, EXPERTS),
    ]
    for number, (other, dims) in enumerate(others):
        again = tmp_path / str(number)
        ranks = run_ranks(dims.world_size, load_and_save, mixture, dims, other, run, again)
        loaded, then = wholes(ranks)
        # Weights that were rounded to even, down from half-way: see `SplitFloats.copy_`.
        assert_same(loaded, saved, last_bits=int(number > 0))
        if number == 0:
            assert_same(then, after)
        saved, run = loaded, again


def test_a_step_waits_until_the_state_of_the_host_is_saved(folder, tmp_path):
    dims, run = ParallelDims(data=2), tmp_path / "run"
    saved = wholes(run_ranks(2, save_during_a_step, folder, dims, "host", run))[0]
    ranks = run_ranks(2, load_and_save, folder, dims, "host", run, tmp_path / "again")
    assert_same(wholes(ranks)[0], saved)


def test_split_floats_are_the_floats_that_they_were_split_from():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values[values.abs() < 1e38], torch.tensor([0.0, -0.0, 1.0, -2.5e-40])])
    values = torch.cat([values, (values[:99].view(torch.int32) & -0x8000).view(torch.float32)])
    split = SplitFloats(values.bfloat16(), torch.zeros(values.shape, dtype=torch.int16))
    split.copy_(values)
    lost = split.joined().view(torch.int32) - values.view(torch.int32)
    half_way = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert not lost[~half_way].any()
    assert half_way.sum() > 10 and set(lost[half_way].tolist()) == {0, -1}
    assert torch.equal(split.view(-1)[3:7].joined(), split.joined()[3:7])


NEEDS_A_GPU = ["use_precision_aware_optimizer", "optimizer_cpu_offload"]


@pytest.mark.parametrize("key", NEEDS_A_GPU)
def test_without_a_gpu_what_needs_one_is_refused_by_name(key, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = OptimizerConfig.model_validate({"lr": 1e-6, key: True})
    with pytest.raises(ValueError, match=f"optimizer.{key} true needs a GPU.*leave it out"):
        check_optimizer(cfg)


@pytest.mark.parametrize("key", NEEDS_A_GPU)
def test_without_transformer_engine_what_needs_it_is_refused(key, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megatron_grpo.policy.optimizer.find_spec", lambda name: None)
    cfg = OptimizerConfig.model_validate({"lr": 1e-6, key: True})
    with pytest.raises(ValueError, match=rf"{key} true needs Transformer Engine.*gpu.sh"):
        check_optimizer(cfg)
