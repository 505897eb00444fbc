"""A generation: what training asks for, what it gets, and what is counted while it is made."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_grpo.agents.fork_pool import EnvironmentsLost
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups
from megatron_grpo.engines.group import Group
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.scored_group import ScoredGroup, Tally
from megatron_grpo.timing import IDLE, PhaseTimer


@dataclass(frozen=True)
class RolloutRequest:
    """A generation that is begun with one version of the weights."""

    generation: int
    policy_version: int
    """Optimizer step of the weights that the engines serve when it is requested."""


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
    """Counters of a generation in progress; with over-sampling, of the next one.

    `record` is called with each phase that is over, the time at which it began, and its seconds.
    """

    policy_version: int
    record: Callable[[str, float, float], None] = lambda phase, since, seconds: None
    tally: Tally = field(default_factory=Tally)
    failure: Exception | None = None
    """The first error of a group; it ends the run when the generation is to be taken."""
    num_dropped: int = 0
    """Groups that became too old."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each phase that is over."""
    phase: str = IDLE
    """`generate` while groups are sampled, then `score` while some have no scores."""
    _since: float = field(default_factory=time.time)
    _num_unanswered: int = 0
    _num_unscored: int = 0
    _sampled: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_group(self) -> None:
        """A group is asked for."""
        self._num_unanswered += 1
        self._sampled.clear()
        self._enter()

    def end_sampling(self) -> None:
        """A group has all samples, and waits for its scores."""
        self._num_unanswered -= 1
        if not self._num_unanswered:
            self._sampled.set()
        self._num_unscored += 1
        self._enter()

    def end_scoring(self) -> None:
        """A group has its scores."""
        self._num_unscored -= 1

    async def until_sampled(self) -> None:
        """Wait until all groups that were asked for have all samples."""
        await self._sampled.wait()

    @property
    def has_open_groups(self) -> bool:
        """Whether groups are sampled or scored."""
        return bool(self._num_unanswered or self._num_unscored)

    def end(self) -> None:
        """No group is open, and none will be opened."""
        self._enter()

    def _enter(self) -> None:
        phase = "generate" if self._num_unanswered else "score" if self._num_unscored else IDLE
        if phase == self.phase:
            return
        now = time.time()
        if self.phase:
            self.seconds[self.phase] += now - self._since
            self.record(self.phase, self._since, now - self._since)
        self.phase, self._since = phase, now


class Runner:
    """Makes the generations of a run, on rank 0; `RolloutScheduler` knows when.

    A `GenerationRunner` has engines make them, and a `Replay` reads those of another run.
    """

    def begin(self, request: RolloutRequest) -> None:
        """Begin a generation; one whose engines were lost continues if the request is the same."""

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation and return it.

        Raises NoServingEngine if engines may come back, and RolloutAborted for any other failure,
        so that the run saves what it has learnt before it ends; Preempted instead of these if the
        scheduler wants the machine back.
        """
        raise NotImplementedError

    def pause(self, next_version: int) -> None:
        """Return when a push of that version may begin, through which engines keep requests."""

    def abort(self) -> None:
        """Return when no engine has a request; they are asked again at `resume`."""

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version."""

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """Contents for a checkpoint: groups of unfinished generations, their samples so far, and
        finished generations. Empty if the checkpoint waits for generations (`may_be_saved`)."""
        return None, None, {}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint, before anything is begun or resumed."""

    def close(self) -> None:
        """Cancel the generations in progress."""


@contextmanager
def as_rollout_aborted(what: str) -> Iterator[None]:
    """Turn a failure of `what` in the block into RolloutAborted: all ranks save and stop."""
    try:
        yield
    except (NoServingEngine, RolloutAborted):
        raise
    except (RewardError, TimeoutError, EngineError, EnvironmentsLost) as error:
        raise RolloutAborted(f"{what} failed: {error}") from error
