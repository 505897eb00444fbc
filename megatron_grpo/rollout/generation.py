"""A generation: its groups, with their scores, and what is counted while they are made.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups whose rewards are all equal,
and so have advantage 0. DAPO compares accuracies, not total rewards: a length penalty would give
most all-wrong groups different totals. ``grpo.dynamic_sample_reward`` names the term to compare.
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
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.group import Group
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.timing import IDLE, PhaseTimer, Record


@dataclass(frozen=True)
class ScoredGroup:
    """The samples of one prompt, their score by each reward function, and the weighted sums."""

    samples: Sequence[Sample]
    rewards: Sequence[dict[str, float]]
    totals: Sequence[float]

    def has_reward_variance(self, term: str | None) -> bool:
        """Whether any two samples that could be scored differ in this term; None: in the total."""
        values = self.totals if term is None else [reward[term] for reward in self.rewards]
        scored = torch.tensor(values, dtype=torch.float64)
        scored = scored[~torch.tensor(self.totals, dtype=torch.float64).isnan()]
        return len(scored) > 0 and bool(differ(scored.min(), scored.max()))


@dataclass(frozen=True)
class RolloutBatch:
    """A finished generation, as it came from engines and rewards."""

    experience: Experience
    metrics: dict[str, float]
    """Metrics of how it was made, logged by the first step that trains on it."""
    replaced: Sequence[ScoredGroup] = ()
    """The groups that dynamic sampling replaced; not known of a generation from a checkpoint."""


@dataclass(eq=False)
class Attempt:
    """A group on its way through engines and rewards."""

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
    """Called with each phase that is over, if it is made in the background."""
    failure: Exception | None = None
    """The first error of a group; it ends the run when the generation is to be taken."""
    num_sampling: int = 0
    """Groups that wait for samples."""
    num_scoring: int = 0
    """Groups that have all samples, and wait for scores."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no group waits for samples."""
    phase: str = IDLE
    """`generate` while groups are sampled, then `score` while some have no scores."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase that is over."""
    totals: list[float] = field(default_factory=list)
    """Rewards of all samples that were scored, NaN for those that could not be; also of groups that
    no generation takes."""
    num_failed: int = 0
    """Samples that could not be scored."""
    num_groups: int = 0
    num_equal: int = 0
    """Groups without `has_reward_variance`."""
    num_dropped: int = 0
    """Groups that became too old."""
    _since: float = field(default_factory=time.time)

    def enter_phase(self) -> None:
        """Enter the phase that the numbers of groups make it."""
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

    def metrics(self, num_replaced: int, cfg: GRPOConfig) -> dict[str, float]:
        """Metrics of the generation, for which `num_replaced` other prompts were tried."""
        metrics: dict[str, float] = {"reward/failed": self.num_failed}
        if cfg.dynamic_sample and self.num_groups:
            metrics["rollout/num_resampled_prompts"] = num_replaced
            scored = [total for total in self.totals if not math.isnan(total)]
            metrics["unfiltered/reward"] = fmean(scored) if scored else 0.0
            metrics["unfiltered/frac_reward_zero_std"] = self.num_equal / self.num_groups
        return metrics


class Runner:
    """Makes the generations of a run, on rank 0; `RolloutScheduler` knows when. A
    `GenerationRunner` has engines make them, and a `Replay` reads those of another run."""

    def begin(self, generation: int, policy_version: int) -> None:
        """Begin a generation with weights of that version; continue one that lost its engines."""

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation.

        Raises NoServingEngine if engines may come back, RolloutAborted for any other failure, so
        that the run saves before it ends, and Preempted instead if the job is preempted.
        """
        raise NotImplementedError

    def pause(self, next_version: int) -> None:
        """Return when a push of that version may begin, through which engines keep requests."""

    def abort(self) -> None:
        """Return when no engine has a request; they are asked again at `resume`."""

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version."""

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """For a checkpoint: groups of unfinished generations, their samples so far, and finished
        generations; nothing if the checkpoint waits for generations (`may_be_saved`)."""
        return None, None, {}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint, before anything is begun or resumed."""

    def close(self) -> None:
        """Cancel the generations in progress."""


@contextmanager
def as_rollout_aborted(what: str, is_preempted: Callable[[], bool]) -> Iterator[None]:
    """Turn a failure of `what` in the block into RolloutAborted, so that all ranks save and stop,
    and any exception into Preempted if the run was told to stop."""
    try:
        yield
    except Exception as error:
        # Slurm signals engines and processes of rewards at the same moment, so these fail, too.
        if is_preempted():
            raise Preempted(str(error)) from error
        if isinstance(error, NoServingEngine | RolloutAborted):
            raise
        if isinstance(error, RewardError | TimeoutError | EngineError | InstancesLost):
            raise RolloutAborted(f"{what} failed: {error}") from error
        raise
