"""Makes generations, in threads of their own if they are made beside the training. Rank 0 only."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from queue import SimpleQueue

from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups
from megatron_grpo.data.samples import Sample
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.generation import Generation
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import preempted_instead
from megatron_grpo.rewards import RewardError
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup
from megatron_grpo.rollout.generate import Rollout, RolloutBatch, Rollouter, RolloutRequest
from megatron_grpo.rollout.open_samples import experience_of, groups_of, may_be_saved
from megatron_grpo.rollout.replay import Replay, ReplayedRollout
from megatron_grpo.timing import IDLE, ROLLOUT, WAIT, PhaseTimer, Timeline
from megatron_grpo.watchdog import Watchdog


@contextmanager
def as_rollout_aborted(what: str) -> Iterator[None]:
    """Turn a failure of `what` in the block into RolloutAborted: all ranks save and stop."""
    try:
        yield
    except (NoServingEngine, RolloutAborted):
        raise
    except (RewardError, TimeoutError, EngineError, EnvironmentsLost) as error:
        raise RolloutAborted(f"{what} failed: {error}") from error


@dataclass
class Making:
    """A generation that is being made."""

    rollout: Rollout | ReplayedRollout
    made: Future[RolloutBatch] | None = None
    """What its thread makes; None without a thread."""
    phases: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    """The phases that the thread enters; None when it ends."""

    def wait(self, timer: PhaseTimer) -> RolloutBatch:
        """The thread's result. Meanwhile `timer` enters the thread's phases, since the watchdog has
        a limit for each."""
        assert self.made is not None
        phase: str | None = IDLE
        while phase is not None:
            with timer.phase(WAIT, phase):
                phase = self.phases.get()
            while not self.phases.empty():  # skip phases that are over
                phase = self.phases.get()
        return self.made.result()


@dataclass
class Restored:
    """What a checkpoint holds of an unfinished generation."""

    samples: list[Sample] = field(default_factory=list)
    scored: list[ScoredGroup] = field(default_factory=list)
    """Those of its groups that were scored; their samples are among the `samples`."""
    engines: set[str] = field(default_factory=set)
    """Addresses of the engines that had answered."""


class RolloutRunner:
    """Makes generations, in the threads of the rollouter if it has any."""

    def __init__(
        self, rollouter: Rollouter | Replay, watchdog: Watchdog, timeline: Timeline
    ) -> None:
        self._rollouter, self._watchdog, self._timeline = rollouter, watchdog, timeline
        self.in_flight = rollouter.in_flight
        self._making: dict[int, Making] = {}
        self._restored: dict[int, Restored] = defaultdict(Restored)
        """By generation, until it is begun."""

    def begin(self, request: RolloutRequest) -> None:
        """Begin a generation; one whose engines were lost continues if the request is the same."""
        making = self._making.get(request.generation)
        if making is None or making.rollout.request != request:
            if making is not None:
                making.rollout.abandon()
            making = Making(rollout := self._rollouter.rollout(request))
            restored = self._restored.pop(request.generation, None)
            if restored and restored.samples and isinstance(rollout, Rollout):
                rollout.open = rollout.begin()
                assert isinstance(rollout.open, Generation), "a checkpoint holds no dialogues"
                rollout.open.restore(restored.samples)
                rollout.open.engines |= restored.engines
                if rollout.early:
                    rollout.early.restore(restored.scored)
            self._making[request.generation] = making
        self._submit(making)

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation and return it; without a thread, make it here.

        Raises NoServingEngine if engines may come back, and RolloutAborted for any other failure,
        so that the run saves what it has learnt before it ends; Preempted instead of these if the
        scheduler wants the machine back.
        """
        making = self._making[generation]
        with (
            preempted_instead(lambda: self._watchdog.is_preempted),
            as_rollout_aborted(f"generation {generation}"),
        ):
            made = making.wait(timer) if making.made else making.rollout.run(timer)
        del self._making[generation]
        return made

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version; generations that failed for lack of an engine are
        submitted again."""
        if not self.in_flight:
            return
        self.in_flight.resume(policy_version)
        for making in self._making.values():
            made = making.made
            if made and made.done() and isinstance(made.exception(), NoServingEngine):
                self._submit(making)

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """What a checkpoint holds: the groups of unfinished generations, their samples so far, and
        the finished generations. Empty if the checkpoint waits for generations (`may_be_saved`)."""
        rollouter = self._rollouter
        if isinstance(rollouter, Replay) or not may_be_saved(rollouter.cfg):
            return None, None, {}
        assert self.in_flight is not None
        with self.in_flight.suspended():
            return self._open_groups(rollouter.stream)

    def _open_groups(
        self, stream: PromptStream
    ) -> tuple[OpenGroups, Experience | None, dict[int, RolloutBatch]]:
        complete: dict[int, RolloutBatch] = {}
        groups: dict[int, list[Sample]] = {}
        scored: dict[int, ScoredGroup] = {}
        engines: dict[int, tuple[str, ...]] = {}
        for generation, making in self._making.items():
            rollout, made = making.rollout, making.made
            if made and made.done() and not made.exception():
                complete[generation] = made.result()
            elif isinstance(rollout, Rollout) and isinstance(requests := rollout.open, Generation):
                prompts = stream.batch(generation)
                first = generation * len(prompts)
                places = {prompt.index: first + number for number, prompt in enumerate(prompts)}
                for sample in requests.so_far():
                    groups.setdefault(places[sample.prompt.index], []).append(sample)
                if early := rollout.early:
                    scored |= {places[index]: group for index, group in early.so_far().items()}
                engines |= dict.fromkeys(places.values(), tuple(sorted(requests.engines.copy())))
        saved = OpenGroups(
            next_number=max(engines, default=-1) + 1,
            untaken=tuple(sorted(engines)),
            engines=tuple(sorted(engines.items())),
        )
        return saved, experience_of({**groups, **scored}), complete

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the samples of a checkpoint: `begin` continues the generations that have any."""
        size = self._rollouter.stream.batch_size
        for place, group in groups_of(samples).items():
            restored = self._restored[place // size]
            if isinstance(group, ScoredGroup):
                restored.scored.append(group)
                group = group.samples
            restored.samples += group
        for place, urls in saved.engines:
            self._restored[place // size].engines.update(urls)

    def close(self) -> None:
        """Cancel the generations in progress, since their rollouter is about to be closed."""
        if futures := [making.made for making in self._making.values() if making.made]:
            self._rollouter.cancel()
            wait(futures)

    def _submit(self, making: Making) -> None:
        if threads := self._rollouter.threads:
            making.phases = SimpleQueue()
            making.made = threads.submit(self._make, making)

    def _make(self, making: Making) -> RolloutBatch:
        """Make the generation, in a thread; its metrics include the seconds it took."""
        rollout = making.rollout

        def record(name: str, began: float, seconds: float) -> None:
            row = ROLLOUT + rollout.request.generation % self._timeline.num_rollouts
            self._timeline.add(name, began, seconds, row, **asdict(rollout.request))

        timer = PhaseTimer(making.phases.put, record)
        try:
            made = rollout.run(timer)
            seconds = timer.metrics()
            del seconds["time/step"]
            return replace(made, metrics={**made.metrics, **seconds})
        finally:
            making.phases.put(None)
