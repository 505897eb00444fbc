"""Communication that overlaps with computation changes no number: gradients, weights, faults."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    accumulate,
    checkpoints_of,
    layout_name,
    numbers_of,
    pack_all,
    start_policy,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.policy import chunks
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Policy, unwrapped
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.skipped_steps import name_nonfinite
from parallel import Box, ParallelDims
from parallel.groups import Groups
from parallel.packing import PackedBatch

OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
SMALL = 5_000
"""Parameters in a bucket; by default so many that a tiny model has only one."""
DENSE = [
    ParallelDims(data=2),
    ParallelDims(tensor=2, context=2),
    ParallelDims(pipeline=2, data=2, num_layers_in_last_pipeline_stage=1),
    ParallelDims(pipeline=2, virtual_pipeline=2, data=2),
]
MIXED = [
    ParallelDims(data=2, expert=2),
    ParallelDims(tensor=2, expert_tensor=1, expert=2),
    ParallelDims(tensor=2, data=2, expert=2),
    ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2),
]
SLOW = [("llama", DENSE[2]), ("qwen3", DENSE[3]), ("qwen3_moe", MIXED[0]), ("qwen3_moe", MIXED[3])]
"""Of each of these layouts is another model, or are steps."""
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else [])
    for case in (
        *(("llama", dims) for dims in DENSE),
        *(("qwen3", dims) for dims in DENSE[-2:]),
        *(("qwen3_moe", dims) for dims in MIXED),
        ("deepseek_v3", MIXED[-1]),
    )
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    def case(family: str, **overrides: Any) -> OracleCase:
        folder = tmp_path_factory.mktemp(family)
        return OracleCase.of(tiny_model(folder, family, num_hidden_layers=4, **overrides))

    return {
        "llama": case("llama", tied=True),
        "qwen3": case("qwen3", tied=False),
        "qwen3_moe": case("qwen3_moe"),
        "deepseek_v3": case("deepseek_v3"),
    }


def in_buckets(rank: int, size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(rank, *args)` with buckets of about `size` parameters."""
    chunks.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=size)
    return fn(rank, *args)


def bucket_groups(policy: Policy) -> list[Any]:
    return [
        group
        for chunk in policy.chunks
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


def second_gradient(rank: int, folder: Path, dims: ParallelDims) -> tuple[Numbers, float]:
    """Numbers of a step after one in which Megatron learned which gradients there are.

    With them: how many of the sums were on their way when the last backward was over.
    """
    policy, groups = start_policy(rank, folder, dims, *OVERLAP)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    accumulate(policy, groups, share)
    if groups.coordinates.pipeline == 0:  # Megatron-Core has one bucket in later stages
        assert len(bucket_groups(policy)) > len(policy.chunks)
    started = []
    finish = unwrapped(policy.chunks[0]).config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        started.extend(group.grad_reduce_handle is not None for group in bucket_groups(policy))
        finish(*args, **kwargs)

    unwrapped(policy.chunks[0]).config.finalize_model_grads_func = finalize
    numbers = numbers_of(policy, groups, share)
    return numbers, sum(started) / len(started)


@pytest.mark.parametrize(
    ("name", "dims"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else layout_name(value),
)
def test_gradients_that_are_summed_in_the_backward_equal_transformers(cases, name, dims):
    case = cases[name]
    ranks = run_ranks(
        dims.world_size, in_buckets, SMALL, second_gradient, case.folder, dims, timeout=240
    )
    case.check([numbers for numbers, _ in ranks])
    assert {started for _, started in ranks} == {1.0}


Boxes = list[tuple[str, Box, Tensor]]
STEPS = [
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
    # As large as elements of a clipped gradient: steps of Adam do not depend on its scale else.
    "optimizer.adam_eps=1e-3",
]


def is_whole(policy: Policy) -> bool:
    """Whether this rank has all new weights, and not only its shard of them."""
    names = {name: values.detach().clone() for name, values in own_weights(policy).items()}
    return all(torch.equal(names[name], values) for name, values in policy.parameters().items())


def own_weights(policy: Policy) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": values
        for number, chunk in enumerate(policy.chunks)
        for name, values in unwrapped(chunk).named_parameters()
    }


def fault(policy: Policy, groups: Groups, share: Sequence[PackedBatch]) -> str:
    """Of which tensor a step says that its gradient is not finite; nothing is updated.

    How many of its values a rank has contributed itself depends on where shards lie.
    """
    bad = [replace(batch, loss_weights=batch.loss_weights * torch.nan) for batch in share]
    accumulate(policy, groups, bad)
    assert not torch.tensor(gradient_norm(policy.optimizer)).isfinite()
    return name_nonfinite(policy, [], torch.device("cpu")).partition(" has ")[0]


Steps = tuple[list[Any], list[bool], Boxes]


def take_steps(
    rank: int, folder: Path, dims: ParallelDims, resumed: Path | None, saved: Path, *overrides: str
) -> Steps:
    """What steps of several lengths see, whether the weights were whole after each; and these."""
    policy, groups = start_policy(rank, folder, dims, *STEPS, *overrides)
    share = pack_all(LENGTHS * 2, dims)[groups.coordinates.data :: dims.data]
    seen: list[Any] = []
    if resumed:
        checkpoints_of(resumed, policy, folder, dims).load()
    checkpoints = checkpoints_of(saved, policy, folder, dims)  # as a run has them: before any step
    whole = []
    for step, num_microbatches in enumerate((len(share), dims.pipeline, len(share))):
        # The forward of training, or one without gradient, is the first to see new weights.
        if step != 1:
            seen += [values for values, _ in compute_logprobs(policy, share, 1.0, groups)]
        if step == 2:
            seen.append(fault(policy, groups, share))
        accumulate(policy, groups, share[:num_microbatches])
        seen.append(gradient_norm(policy.optimizer))
        apply_gradient(policy.optimizer, seen[-1])
        if step == 1:  # else nothing but a forward, or at last the save, is first to read weights
            whole.append(is_whole(policy))
    checkpoints.save(TrainerState(step=3), {})
    checkpoints.wait()
    parameters = policy.parameters()
    weights = [
        (piece.tensor, piece.box, parameters[piece.local][piece.local_box.slices].detach().clone())
        for piece in policy.layout.pieces
    ]
    return seen, whole, weights


def assert_same(ranks: Sequence[Steps], others: Sequence[Steps], tolerance: float) -> None:
    for (seen, _, weights), (others_seen, _, others_weights) in zip(ranks, others, strict=True):
        for one, other in zip(seen, others_seen, strict=True):
            if isinstance(one, str):
                assert one == other
            else:
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for (name, _, values), (_, _, expected) in zip(weights, others_weights, strict=True):
            torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param("llama", ParallelDims(data=2), marks=pytest.mark.slow),
        pytest.param(
            "llama",
            ParallelDims(pipeline=2, virtual_pipeline=2, data=2),
            marks=pytest.mark.slow,
        ),
        ("qwen3_moe", ParallelDims(data=2, expert=2)),
        pytest.param("qwen3_moe", ParallelDims(tensor=2, data=2, expert=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else layout_name(value),
)
def test_steps_skipped_steps_and_a_resume_are_those_without_overlap(cases, name, dims, tmp_path):
    folder = cases[name].folder

    def run(overlap: Sequence[str], resumed: str | None, saved: str, size: int) -> list[Steps]:
        start = tmp_path / resumed if resumed else None
        args = folder, dims, start, tmp_path / saved, *overlap
        return run_ranks(dims.world_size, in_buckets, size, take_steps, *args, timeout=240)

    plain = run([], None, "plain", SMALL)
    assert all(all(whole) for _, whole, _ in plain)
    one_bucket = run(OVERLAP, None, "one bucket", 1 << 30)
    assert_same(one_bucket, plain, 0.0)
    buckets = run(OVERLAP, None, "buckets", SMALL)
    assert_same(buckets, plain, 1e-5)
    assert not any(any(whole) for _, whole, _ in buckets)
    # Shards lie elsewhere in the files of both kinds.
    assert_same(run(OVERLAP, "plain", "on", SMALL), run([], "buckets", "off", SMALL), 1e-5)
