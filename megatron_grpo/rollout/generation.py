"""Generation: groups with their scores, and counters while they are made.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups with equal rewards: their
advantages are 0. DAPO compares accuracies, not total rewards: a length penalty would give most
all-wrong groups different totals. `grpo.dynamic_sample_reward` names the term to compare.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

import torch

from megatron_grpo.agents.fork_pool import InstancesLost
from megatron_grpo.algorithm.advantages import differ
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.group import Group, print_failures
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError, check_failed
from megatron_grpo.timing import IDLE, PhaseTimer, Record


@dataclass(frozen=True)
class ScoredGroup:
    """Samples of one prompt, with scores by reward function and weighted sums."""

    samples: Sequence[Sample]
    rewards: Sequence[dict[str, float]]
    totals: Sequence[float]

    def has_reward_variance(self, term: str | None) -> bool:
        """Whether scored samples differ in `term`, or for None in their totals."""
        values = self.totals if term is None else [reward[term] for reward in self.rewards]
        scored = torch.tensor(values, dtype=torch.float64)
        scored = scored[~torch.tensor(self.totals, dtype=torch.float64).isnan()]
        return len(scored) > 0 and bool(differ(scored.min(), scored.max()))


@dataclass(frozen=True)
class RolloutBatch:
    """A finished generation, before training."""

    experience: Experience
    metrics: dict[str, float]
    """Metrics of sampling and scoring, logged by the first step on this generation."""
    replaced: Sequence[ScoredGroup] = ()
    """Groups that dynamic sampling replaced; empty for a generation from a checkpoint."""


@dataclass(eq=False)
class Attempt:
    """A group in progress: sampled, then scored."""

    group: Group
    task: "asyncio.Task[None] | None" = None
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    scored: ScoredGroup | None = None


@dataclass
class Generation:
    """Counters of a generation in progress; with over-sampling, of the next one."""

    policy_version: int
    record: Record | None = None
    """Callback for each finished phase, if the generation is made in the background."""
    failure: Exception | None = None
    """First error of a group; it ends the run when the generation is taken."""
    num_sampling: int = 0
    """Groups that wait for samples."""
    num_scoring: int = 0
    """Groups that have all samples and wait for scores."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no group waits for samples."""
    phase: str = IDLE
    """`generate` while groups wait for samples, then `score` while some wait for scores."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each finished phase."""
    totals: list[float] = field(default_factory=list)
    """Rewards of all samples, NaN for failed ones; groups that no generation takes included."""
    num_failed: int = 0
    """Samples with a failed score."""
    unreported: list[Group] = field(default_factory=list)
    """Scored groups with failures of partners that were not printed."""
    num_groups: int = 0
    num_equal: int = 0
    """Groups without `has_reward_variance`."""
    num_dropped: int = 0
    """Groups that became too old."""
    _since: float = field(default_factory=time.time)

    def enter_phase(self) -> None:
        """Update `phase`, `sampled` and `seconds` after a change of `num_sampling` or
        `num_scoring`."""
        phase = "generate" if self.num_sampling else "score" if self.num_scoring else IDLE
        if phase == self.phase:
            return
        if phase == "generate":
            self.sampled.clear()
        else:
            self.sampled.set()
        now = time.time()
        if self.phase:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
            if self.record:
                self.record(self.phase, self._since, now - self._since)
        self.phase, self._since = phase, now

    def add(self, group: ScoredGroup, cfg: GRPOConfig) -> bool:
        """Count a group; returns whether dynamic sampling replaces it."""
        is_equal = not group.has_reward_variance(cfg.dynamic_sample_reward)
        self.totals += group.totals
        self.num_failed += sum(map(math.isnan, group.totals))
        self.num_groups += 1
        self.num_equal += is_equal
        return cfg.dynamic_sample and is_equal

    def check_failed(self, cfg: RewardConfig) -> None:
        """Print what partners have failed since the last call. Raises RewardError if too many
        scores have failed."""
        print_failures(self.unreported)
        self.unreported.clear()
        check_failed(self.num_failed, len(self.totals) or 1, cfg)

    def metrics(self, num_replaced: int, cfg: GRPOConfig) -> dict[str, float]:
        """Metrics of the generation; `num_replaced` prompts were replaced by others."""
        metrics: dict[str, float] = {"reward/failed": self.num_failed}
        if cfg.dynamic_sample and self.num_groups:
            metrics["rollout/num_resampled_prompts"] = num_replaced
            scored = [total for total in self.totals if not math.isnan(total)]
            metrics["unfiltered/reward"] = fmean(scored) if scored else 0.0
            metrics["unfiltered/frac_reward_zero_std"] = self.num_equal / self.num_groups
        return metrics


class Runner:
    """Makes the generations of a run on rank 0, when `RolloutScheduler` calls it: by engines
    (`GenerationRunner`), or from the files of another run (`Replay`)."""

    def begin(self, generation: int, policy_version: int) -> None:
        """Begin a generation with weights of this version, or continue it after lost engines."""

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation. Raises NoServingEngine if engines may come back, RolloutAborted
        for any other failure, so that the run saves before it ends, and Preempted if the job is
        preempted."""
        raise NotImplementedError

    def pause(self, next_version: int) -> None:
        """Return when a push of `next_version` may begin; engines keep their requests."""

    def abort(self) -> None:
        """Return when no engine has a request; `resume` requests the rest again."""

    def resume(self, policy_version: int) -> None:
        """Continue with weights of this version."""

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """State for a checkpoint: groups of unfinished generations, their samples so far, and
        finished generations; nothing unless `may_be_saved`."""
        return None, None, {}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint, before the first `begin` or `resume`."""

    def close(self) -> None:
        """Cancel generations in progress."""


@contextmanager
def as_rollout_aborted(what: str, is_preempted: Callable[[], bool]) -> Iterator[None]:
    """Turn failures in the block into RolloutAborted, so that all ranks save and stop, and any
    exception of a preempted job into Preempted. `what` is for messages."""
    try:
        yield
    except Exception as error:
        # First: Slurm also signals engines and reward processes, so their failures come with it.
        if is_preempted():
            raise Preempted(str(error)) from error
        if isinstance(error, NoServingEngine | RolloutAborted):
            raise
        if isinstance(error, RewardError | TimeoutError | EngineError | InstancesLost):
            raise RolloutAborted(f"{what} failed: {error}") from error
        raise
