"""A run of megatron-core 0.16.1 resumes: tests/golden/checkpoint_0_16_1 says how it was saved."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    accumulate,
    checkpoints_of,
    gradient_boxes,
    pack_all,
    start_policy,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import ParallelDims

SAVED = Path(__file__).parents[2] / "golden" / "checkpoint_0_16_1"
DIMS = ParallelDims(tensor=2, pipeline=2, expert_tensor=1)
SCHEDULE = ("optimizer.lr_warmup_steps=4", "train.num_steps=9")

Step = tuple[float, float, dict[str, float]]
"""Learning rate, gradient norm, and squared norms of this rank's part of each gradient."""


def resume(rank: int, model: Path, run: Path) -> list[Step]:
    """Load the checkpoint and take two steps."""
    policy, groups = start_policy(rank, model, DIMS, *SCHEDULE)
    assert checkpoints_of(run, policy, model, DIMS, *SCHEDULE).load() == TrainerState(step=1)
    steps = []
    for _ in range(2):
        lr = policy.scheduler.get_lr(policy.optimizer.param_groups[0])
        accumulate(policy, groups, pack_all(LENGTHS, DIMS))
        squares: dict[str, float] = defaultdict(float)
        for name, _, values in gradient_boxes(policy):
            squares[name] += float(values.double().square().sum())
        norm = gradient_norm(policy.optimizer)
        apply_gradient(policy.optimizer, norm)
        policy.scheduler.step(increment=1)
        steps.append((lr, norm, squares))
    return steps


def test_a_run_of_megatron_core_0_16_resumes_at_another_layout(tmp_path):
    sizes = {"hidden_size": 16, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
    # Another seed: the right weights can only come from the checkpoint.
    model = tiny_model(tmp_path / "model", "qwen3_moe", tied=True, seed=1, **sizes)
    run = shutil.copytree(SAVED, tmp_path / "run")
    ranks = run_ranks(DIMS.world_size, resume, model, run)
    recorded = json.loads((SAVED / "next_steps.json").read_text())
    for number, expected in enumerate(recorded):
        steps = [rank[number] for rank in ranks]
        assert {lr for lr, _, _ in steps} == {expected["lr"]}
        assert all(norm == pytest.approx(expected["norm"], rel=1e-5) for _, norm, _ in steps)
        norms: dict[str, float] = defaultdict(float)
        for _, _, squares in steps:
            for name, square in squares.items():
                norms[name] += square
        assert norms.keys() == expected["gradients"].keys()
        for name, square in norms.items():
            assert square**0.5 == pytest.approx(expected["gradients"][name], rel=1e-4), name
