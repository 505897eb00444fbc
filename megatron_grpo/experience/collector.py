"""Makes generations, in the calling thread or in the background. Rank 0 only."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.experience.experience_source import Collected, ExperienceSource
from megatron_grpo.launch.preemption import preempted_instead
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout import EngineError, EnginesLost, EnginesOut
from megatron_grpo.timeline import ROLLOUT, Timeline
from megatron_grpo.timing import BETWEEN, WAIT, PhaseTimer
from megatron_grpo.watch import Watch


@contextmanager
def as_engines_lost(what: str) -> Iterator[None]:
    """Turn a failure of `what` in the block into EnginesLost, on which all ranks save and stop."""
    try:
        yield
    except (EnginesOut, EnginesLost):
        raise
    except (RewardError, TimeoutError, EngineError, EnvironmentsLost) as error:
        raise EnginesLost(f"{what} failed: {error}") from error


@dataclass(frozen=True)
class Asked:
    """A generation that was requested from the engines."""

    generation: int
    policy_version: int
    """Version of the weights that the engines serve meanwhile."""


class Collector:
    """Makes one generation at a time with the `source`.

    With a `thread` it is made there while the caller does something else. That thread must live as
    long as the source: when it ends, Linux ends the processes that it started, such as engines.
    """

    def __init__(
        self,
        source: ExperienceSource,
        thread: ThreadPoolExecutor | None,
        watch: Watch,
        timeline: Timeline,
    ) -> None:
        self._source, self._thread = source, thread
        self._watch, self._timeline = watch, timeline
        self._asked: Asked | None = None
        self._making: Future[Collected] | None = None
        self._changed = threading.Condition()
        self._phase, self._is_over = BETWEEN, True

    def begin(self, asked: Asked) -> None:
        """Request this generation; with a thread, start making it there."""
        self._asked = asked
        if self._thread:
            self._phase, self._is_over = BETWEEN, False
            self._making = self._thread.submit(self._make, asked)

    def wait(self, timer: PhaseTimer) -> Collected:
        """Wait for the requested generation and return it; without a thread, make it here.

        Raises EnginesOut if engines may come back, and EnginesLost for any other failure, so that
        the run saves what it has learnt before it ends; Preempted instead of these if the scheduler
        wants the machine back. The watch is told which phase is waited for, as each has its limit.
        """
        assert self._asked is not None
        with (
            preempted_instead(lambda: self._watch.is_preempted),
            as_engines_lost(f"generation {self._asked.generation}"),
        ):
            return self._made(self._asked, timer)

    def _made(self, asked: Asked, timer: PhaseTimer) -> Collected:
        if self._making is None:
            return self._source.collect(asked.generation, asked.policy_version, timer)
        is_over = False
        while not is_over:
            with self._changed:
                phase = self._phase
            with timer.phase(WAIT, phase), self._changed:
                self._changed.wait_for(lambda: self._phase != phase or self._is_over)  # noqa: B023
                is_over = self._is_over
        return self._making.result()

    def close(self) -> None:
        """Cancel a generation in progress, since its source is about to be closed."""
        if not self._is_over:
            self._source.cancel()
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)

    def _make(self, asked: Asked) -> Collected:
        """Make the generation, in the thread; its metrics include the seconds it took."""

        def record(name: str, began: float, seconds: float) -> None:
            self._timeline.add(name, began, seconds, ROLLOUT, **asdict(asked))

        timer = PhaseTimer(self._enter, record)
        try:
            made = self._source.collect(asked.generation, asked.policy_version, timer)
            seconds = timer.metrics()
            del seconds["time/step"]
            return replace(made, metrics={**made.metrics, **seconds})
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _enter(self, phase: str) -> None:
        with self._changed:
            self._phase = phase
            self._changed.notify_all()
