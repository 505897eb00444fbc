"""The first step on a generation needs no pass for old log-probabilities: its forward has them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    gradient_boxes,
    layout_name,
    random_sequences,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.prepare import Preparation, add_logprobs, with_old_logprobs
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import Policy
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.groups import Groups
from parallel.microbatches import CostModel
from parallel.packing import PackedBatch, pack

RECIPE = (
    "grpo.generation_batch_size=12",
    "grpo.num_generations=2",
    "grpo.steps_per_generation=2",
    "grpo.beta=0",
    "grpo.loss_type=grpo",
    "grpo.importance_sampling_level=sequence",
    "grpo.rollout_importance_sampling_mode=token_truncate",
)
RECOMPUTED = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)
SHARED = "grpo.shared_prompts=true"

Step = dict[str, Tensor]
"""Old log-probabilities after a step, its gradient and losses, by name."""


def packed(cfg: Config, groups: Groups) -> list[PackedBatch]:
    """Four microbatches, one of them empty; one has two sequences of the same prompt."""
    sequences = random_sequences(LENGTHS)
    sequences[-1] = replace(sequences[-1], tokens=sequences[-2].tokens.clone())
    alignment = Alignment.for_mesh(groups.dims, groups.dims.tensor > 1)
    numbers = iter(range(len(sequences)))
    batches = [
        pack(
            sequences,
            [next(numbers) for _ in microbatch],
            alignment,
            share_prompts=cfg.grpo.shared_prompts,
        )
        for microbatch in LENGTHS
    ]
    return batches[groups.coordinates.data :: groups.dims.data]


def step_on(
    policy: Policy, batches: Sequence[PackedBatch], cfg: Config, groups: Groups
) -> tuple[Step, Sequence[PackedBatch]]:
    """Results of a step on `batches`, and the batches with old log-probabilities."""
    metrics = accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), 0.0)
    kept = with_old_logprobs(batches, metrics.logprobs, groups)
    found = {f"loss {number}": loss for number, loss in enumerate(metrics.losses)}
    for number, batch in enumerate(kept):
        assert (batch.old_logprobs is not None) == policy.is_last_stage
        if batch.old_logprobs is not None:
            found[f"logprobs {number}"] = batch.old_logprobs
    found |= {f"{name} {box}": values for name, box, values in gradient_boxes(policy)}
    return found, kept


def steps(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> list[Step]:
    """Steps with old log-probabilities of a pass, of its forward, and as that forward kept them."""
    policy, groups = start_policy(rank, folder, dims, *RECIPE, *overrides)
    cfg = tiny_config(folder, dims, *RECIPE, *overrides)
    batches = packed(cfg, groups)
    computed, skipped = (
        add_logprobs(batches, policy, None, cfg, groups, is_next=is_next)
        for is_next in (False, True)
    )
    assert all(each.old_logprobs is None for each in skipped)
    apart, _ = step_on(policy, computed, cfg, groups)
    own, kept = step_on(policy, skipped, cfg, groups)
    again, _ = step_on(policy, kept, cfg, groups)
    return [apart, own, again]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dims", "overrides"),
    [
        ("llama", ParallelDims(), []),
        pytest.param("llama", ParallelDims(), [RECOMPUTED], marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(), [SHARED], marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(tensor=2), [], marks=pytest.mark.slow),
        pytest.param("llama", ParallelDims(context=2), [], marks=pytest.mark.slow),
        ("llama", ParallelDims(pipeline=2, virtual_pipeline=2), []),
        ("llama", ParallelDims(context=2, data=2), [SHARED]),
        ("qwen3_moe", ParallelDims(data=2, expert=2), []),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else None,
)
def test_the_first_forward_gives_old_logprobs_and_gradient_of_a_pass_bit_for_bit(
    tmp_path: Path, family: str, dims: ParallelDims, overrides: list[str]
) -> None:
    folder = tiny_model(tmp_path, family, num_hidden_layers=4)
    for apart, *others in run_ranks(dims.world_size, steps, folder, dims, *overrides):
        for other in others:
            assert other.keys() == apart.keys()
            differing = [name for name in apart if not torch.equal(other[name], apart[name])]
            assert not differing


def kept_after_skipped_steps(
    rank: int, folder: Path, dims: ParallelDims
) -> list[list[Tensor | None]]:
    """Old log-probabilities of a good forward, and after one and two skipped steps."""
    policy, groups = start_policy(rank, folder, dims, *RECIPE)
    cfg = tiny_config(folder, dims, *RECIPE)
    batches = packed(cfg, groups)
    found = accumulate_gradient(
        policy, batches, cfg, groups, LossFunction.of(cfg.grpo), 0.0
    ).logprobs
    broken = [torch.full_like(of_batch, torch.nan) for of_batch in found]
    cpu = torch.device("cpu")
    preparation = Preparation(policy, None, CostModel.transformer(64), cfg, groups, cpu)
    good = with_old_logprobs(batches, found, groups)
    once = preparation.after_step(batches, broken, is_skipped=True)
    twice = preparation.after_step(once, [], is_skipped=True)
    return [[batch.old_logprobs for batch in kept] for kept in (good, once, twice)]


@pytest.mark.parametrize(
    "dims", [ParallelDims(pipeline=2, virtual_pipeline=2), ParallelDims(context=2)], ids=layout_name
)
def test_skipped_steps_leave_old_logprobs_of_a_pass_not_their_own(
    tmp_path: Path, dims: ParallelDims
) -> None:
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=4)
    for rank, kept in enumerate(run_ranks(2, kept_after_skipped_steps, folder, dims)):
        is_last_stage = dims.coordinates(rank).pipeline == dims.pipeline - 1
        for values in zip(*kept, strict=True):
            if is_last_stage:
                good, once, twice = values
                assert torch.equal(once, good) and torch.equal(twice, good)
            else:
                assert values == (None, None, None)
