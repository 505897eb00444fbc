"""A loss or gradient that is not finite, on any rank, costs the run one optimizer step."""

import hashlib
import io
import math
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, pack_all, start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.packing import PackedBatch

pytestmark = pytest.mark.fault

NUM_SEQUENCES = sum(map(len, LENGTHS))
OVERRIDES = (
    f"grpo.generation_batch_size={NUM_SEQUENCES}",
    "grpo.num_generations=2",
    "grpo.beta=0",
    "optimizer.weight_decay=0.1",
    "optimizer.lr_decay_style=linear",
    "train.num_steps=10",
)
NAN, INFINITY = math.nan, math.inf


@dataclass(frozen=True)
class Plant:
    """A planted number: in a rank's gradient of a parameter, or in its advantages."""

    rank: int
    value: float
    named: str
    """Its name in the run's message."""
    parameter: str = ""
    """Local name; empty: an advantage of the first microbatch."""


class Steps:
    """A policy on this rank that takes optimizer steps."""

    def __init__(self, rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> None:
        self.rank = rank
        self.cfg = tiny_config(folder, dims, *OVERRIDES, *overrides)
        self.policy, self.groups = start_policy(rank, folder, dims, *OVERRIDES, *overrides)
        self.batches = pack_all(LENGTHS, dims)[self.groups.coordinates.data :: dims.data]
        self.skipped = SkippedSteps(self.cfg.train.max_skipped_steps)

    def step(self, batches: list[PackedBatch] | None = None) -> dict[str, float]:
        batches, beta = batches or self.batches, self.cfg.grpo.beta
        report = train_step(
            self.policy,
            batches,
            self.cfg,
            self.groups,
            LossFunction.of(self.cfg.grpo),
            self.skipped,
            beta,
        )
        parts = self.policy.optimizer.chained_optimizers
        applied = [parameter for part in parts for parameter in part.get_parameters()]
        assert all(each.grad is None for each in applied), "a copy of gradients would stay"
        return report.metrics

    def bad_step(self, plant: Plant) -> dict[str, float]:
        if self.rank != plant.rank:
            return self.step()
        if not plant.parameter:
            first, *others = self.batches
            value = torch.full_like(first.advantages, plant.value)
            return self.step([replace(first, advantages=value), *others])

        def spoil(gradient: Tensor) -> Tensor:
            spoilt = gradient.clone()
            spoilt.view(-1)[0] = plant.value
            return spoilt

        hook = self.policy.parameters()[plant.parameter].register_hook(spoil)
        metrics = self.step()
        hook.remove()
        return metrics

    def digest(self) -> str:
        """A digest of everything that a step changes."""
        schedule = sorted(self.policy.scheduler.state_dict().items())
        return f"{schedule} {self.learnt()}"

    def learnt(self) -> str:
        """Digest of weights, master weights, moments and counts."""
        tensors = list(self.policy.parameters().values())
        for part in self.policy.optimizer.chained_optimizers:
            for master, state in part.optimizer.state.items():
                tensors += [master, *state.values()]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass
class Bad:
    """Outcome of a bad step on one rank."""

    changed: bool
    metrics: dict[str, float]
    output: str


def good_bad_good(
    rank: int, folder: Path, dims: ParallelDims, plants: list[Plant], *overrides: str
) -> list[Bad]:
    """A good step, one bad step for each plant, and a good step as without the bad ones."""
    steps = Steps(rank, folder, dims, f"train.max_skipped_steps={len(plants) + 1}", *overrides)
    first = steps.step()
    before, seen = steps.digest(), []
    for plant in plants:
        with redirect_stderr(io.StringIO()) as output:
            metrics = steps.bad_step(plant)
        seen.append(Bad(steps.digest() != before, metrics, output.getvalue()))
    assert steps.skipped.num_in_a_row == len(plants), [bad.metrics for bad in seen]
    second = steps.step()
    after = steps.digest()
    assert steps.skipped.num_in_a_row == 0

    steps.policy = build_policy(steps.cfg, read_shape(folder), steps.groups)
    assert [steps.step(), steps.step()] == [first, second]
    assert steps.digest() == after != before
    return seen


LAYER = "0.decoder.layers.0."
DOWN = "gradient of model.layers.{}.mlp.down_proj.weight"
LOSS = "loss of microbatch 0 is {}"


CASES = {
    "tensor and pipeline": (
        ParallelDims(tensor=2, pipeline=2),
        [
            # The second stage's only layer is the model's layer 1.
            Plant(3, NAN, DOWN.format(1), LAYER + "mlp.linear_fc2.weight"),
            Plant(0, NAN, "model.embed_tokens", "0.embedding.word_embeddings.weight"),
            # The ranks of a tensor group share one loss. The lower is named.
            Plant(2, -INFINITY, LOSS.format("inf")),
        ],
    ),
    "data": (
        ParallelDims(data=2),
        [
            # In rank 0's part of the sum, or in rank 1's.
            Plant(1, INFINITY, DOWN.format(0), LAYER + "mlp.linear_fc2.weight"),
            Plant(0, -INFINITY, "model.norm.weight", "0.decoder.final_layernorm.weight"),
            # In both microbatches; the square and the norm overflow float32.
            Plant(1, 1e30, "the first 2.0e+30,", LAYER + "mlp.linear_fc2.weight"),
        ],
    ),
    "context": (
        ParallelDims(context=2),
        [
            Plant(1, NAN, DOWN.format(0), LAYER + "mlp.linear_fc2.weight"),
            Plant(1, NAN, LOSS.format("nan")),
        ],
    ),
    # Without sequence parallelism nothing is summed over the copies, and one counts in the norm.
    "copies on tensor ranks": (
        ParallelDims(tensor=2),
        [
            Plant(rank, NAN, "model.layers.0.input_layernorm", LAYER + "input_layernorm.weight")
            for rank in (0, 1)
        ],
    ),
    "two chained optimizers": (
        ParallelDims(data=2, expert=2),
        [
            Plant(
                1,
                NAN,
                "gradient of model.layers.0.mlp.experts.2.down_proj.weight",
                LAYER + "mlp.experts.local_experts.0.linear_fc2.weight",
            ),
            Plant(1, NAN, "model.layers.0.mlp.gate.weight", LAYER + "mlp.router.weight"),
        ],
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("dense"), "qwen3", tied=True)


@pytest.mark.parametrize("case", CASES)
def test_a_bad_number_on_one_rank_changes_nothing_on_any(dense, tmp_path, case):
    dims, plants = CASES[case]
    folder = tiny_model(tmp_path, "qwen3_moe") if dims.expert > 1 else dense
    apart = ["parallel.sequence_parallel=false"] if "copies" in case else []
    ranks = run_ranks(dims.world_size, good_bad_good, folder, dims, plants, *apart)
    for rank, seen in enumerate(ranks):
        for plant, bad in zip(plants, seen, strict=True):
            assert not bad.changed, f"rank {rank} was changed by {plant}"
            assert bad.metrics["skipped_steps"] == 1.0
            assert "grad_norm" not in bad.metrics
            assert all(map(math.isfinite, bad.metrics.values()))
            if rank > 0:
                assert bad.output == ""
                continue
            assert bad.output.startswith("optimizer step skipped: ") and plant.named in bad.output
            assert bad.output.endswith(f" on rank {plant.rank}\n") and bad.output.count("\n") == 1


def only_bad_steps(rank: int, folder: Path, dims: ParallelDims, plants: list[Plant]) -> str:
    steps = Steps(rank, folder, dims, f"train.max_skipped_steps={len(plants)}")
    with redirect_stderr(io.StringIO()), pytest.raises(FloatingPointError) as stopped:
        for plant in plants:
            steps.bad_step(plant)
    assert steps.skipped.num_in_a_row == len(plants)
    return str(stopped.value)


def test_too_many_skipped_steps_in_a_row_stop_all_ranks_with_the_cause_of_each(dense):
    dims = ParallelDims(data=2)
    plants = [
        Plant(1, NAN, DOWN.format(0), LAYER + "mlp.linear_fc2.weight"),
        Plant(0, -INFINITY, LOSS.format("inf")),
    ]
    first, second = run_ranks(dims.world_size, only_bad_steps, dense, dims, plants)
    assert first == second
    assert first.startswith("skipped 2 optimizer steps in a row, and train.max_skipped_steps")
    for plant in plants:
        assert plant.named in first
        assert f"on rank {plant.rank}" in first


def steps_without_anything_to_learn(rank: int, folder: Path, dims: ParallelDims) -> None:
    steps = Steps(rank, folder, dims, "optimizer.weight_decay=0.1")
    steps.step()
    before = steps.learnt()
    equal_rewards = [replace(b, advantages=torch.zeros_like(b.advantages)) for b in steps.batches]
    all_masked = [replace(b, loss_mask=torch.zeros_like(b.loss_mask)) for b in steps.batches]
    for num_steps, batches in enumerate((equal_rewards, all_masked), start=2):
        metrics = steps.step(batches)
        assert steps.learnt() == before
        assert steps.policy.scheduler.num_steps == num_steps
        assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped_steps"] == 0.0
    assert steps.skipped.num_in_a_row == 0
    assert steps.step()["grad_norm"] > 0
    assert steps.learnt() != before


def test_a_batch_in_which_nothing_counts_moves_the_learning_rate_alone_and_is_no_fault(dense):
    dims = ParallelDims(pipeline=2)
    run_ranks(dims.world_size, steps_without_anything_to_learn, dense, dims)


def test_the_count_in_a_row_goes_on_after_a_resume_and_ends_with_a_good_step():
    skipped = SkippedSteps(limit=3)
    skipped.count("a")
    skipped.count("b")
    assert skipped.num_in_a_row == 2
    resumed = SkippedSteps(limit=3, num_in_a_row=skipped.num_in_a_row)
    with pytest.raises(
        FloatingPointError, match=r"^skipped 3 .* 2 before this run was resumed; c$"
    ):
        resumed.count("c")
    skipped.count(None)
    skipped.count("c")
    assert skipped.num_in_a_row == 1
    with pytest.raises(FloatingPointError, match=r"is 1: d$"):
        SkippedSteps(limit=1).count("d")
