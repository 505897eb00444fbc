"""Communication that overlaps with computation changes no step. Rows of test_model.py have the
gradients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    Boxes,
    accumulate,
    boxes_of,
    checkpoints_of,
    layout,
    own_share,
    pack_all,
    start_policy,
)
from helpers.oracle.rows import OVERLAP, SMALL, in_buckets
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import Policy, unwrapped
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.skipped_steps import name_nonfinite
from parallel import ParallelDims
from parallel.groups import Groups
from parallel.packing import PackedBatch

STEPS = [
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
    # As large as a clipped gradient's elements: else Adam's steps do not depend on its scale.
    "optimizer.adam_eps=1e-3",
]


def is_whole(policy: Policy) -> bool:
    """Whether this rank has all new weights, not only its shard."""
    names = {name: values.detach().clone() for name, values in own_weights(policy).items()}
    return all(torch.equal(names[name], values) for name, values in policy.parameters().items())


def own_weights(policy: Policy) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": values
        for number, chunk in enumerate(policy.chunks)
        for name, values in unwrapped(chunk).named_parameters()
    }


def fault(policy: Policy, groups: Groups, share: Sequence[PackedBatch]) -> str:
    """The tensor that a step names for a gradient that is not finite; nothing is updated.

    The message's count is left out: it depends on the shards' boundaries.
    """
    bad = [replace(batch, loss_weights=batch.loss_weights * torch.nan) for batch in share]
    accumulate(policy, groups, bad)
    assert not torch.tensor(gradient_norm(policy.optimizer)).isfinite()
    return name_nonfinite(policy, [], torch.device("cpu")).partition(" has ")[0]


Steps = tuple[list[Any], list[bool], Boxes]


def take_steps(
    rank: int,
    folder: Path,
    dims: ParallelDims,
    size: int,
    resumed: Path | None,
    saved: Path,
    *overrides: str,
) -> Steps:
    """Values seen in steps, whether weights were whole after some of these, and the weights."""
    with in_buckets(size):
        policy, groups = start_policy(rank, folder, dims, *STEPS, *overrides)
    share = own_share(pack_all(LENGTHS * 2, dims), groups)
    seen: list[Any] = []
    if resumed:
        checkpoints_of(resumed, policy, folder, dims).load()
    checkpoints = checkpoints_of(saved, policy, folder, dims)  # as a run has them: before any step
    whole = []
    for step, num_microbatches in enumerate((len(share), dims.pipeline, len(share))):
        # A forward of training or one without gradient is the first to read new weights.
        if step != 1:
            seen += [values for values, _ in compute_logprobs(policy, share, 1.0, groups)]
        if step == 2:
            seen.append(fault(policy, groups, share))
        accumulate(policy, groups, share[:num_microbatches])
        seen.append(gradient_norm(policy.optimizer))
        apply_gradient(policy.optimizer, seen[-1])
        if step == 1:  # in the other steps a forward or the save is first to read weights
            whole.append(is_whole(policy))
    checkpoints.save(TrainerState(step=3), {})
    checkpoints.wait()
    parameters = policy.parameters()
    return seen, whole, boxes_of(policy, parameters, replicas=True)


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
    ("family", "at"),
    [
        pytest.param("llama", "dp2", marks=pytest.mark.slow),
        pytest.param("llama", "pp2 vpp2 dp2", marks=pytest.mark.slow),
        ("qwen3_moe", "dp2 ep2"),
        pytest.param("qwen3_moe", "tp2 dp2 ep2", marks=pytest.mark.slow),
    ],
)
def test_overlap_changes_no_step_no_skipped_step_and_no_resume(family, at, tmp_path):
    dims, tied = layout(at), family == "llama"
    folder = tiny_model(tmp_path / "model", family, num_hidden_layers=4, tied=tied)

    def run(overlap: Sequence[str], resumed: str | None, saved: str, size: int) -> list[Steps]:
        start = tmp_path / resumed if resumed else None
        args = folder, dims, size, start, tmp_path / saved, *overlap
        return run_ranks(dims.world_size, take_steps, *args, timeout=240)

    plain = run([], None, "plain", SMALL)
    assert all(all(whole) for _, whole, _ in plain)
    one_bucket = run(OVERLAP, None, "one bucket", 1 << 30)
    assert_same(one_bucket, plain, 0.0)
    buckets = run(OVERLAP, None, "buckets", SMALL)
    assert_same(buckets, plain, 1e-5)
    assert not any(any(whole) for _, whole, _ in buckets)
    # The shards' boundaries differ between the two files.
    assert_same(run(OVERLAP, "plain", "on", SMALL), run([], "buckets", "off", SMALL), 1e-5)
