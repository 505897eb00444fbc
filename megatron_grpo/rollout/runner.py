"""Makes generations, each by itself, and gives what a checkpoint holds of them. Rank 0 only."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager

from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.generation import CompletionRequests
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.engines.in_flight import InFlight
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import preempted_instead
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup
from megatron_grpo.rollout.generate import Rollout, RolloutBatch, RolloutRequest
from megatron_grpo.rollout.open_samples import (
    Unscored,
    experience_of,
    groups_of,
    may_be_saved,
)
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.timing import PhaseTimer, Timeline
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


class Runner:
    """Makes the generations of a run, on rank 0; `RolloutScheduler` knows when.

    A `RolloutRunner` makes each by itself, a `GroupRunner` all from one queue of groups, and a
    `Replay` reads those of another run.
    """

    in_flight: InFlight | None = None
    """Has the engines work on several generations at a time, through pushes of weights."""

    def begin(self, request: RolloutRequest) -> None:
        """Begin a generation; one whose engines were lost continues if the request is the same."""

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation and return it.

        Raises NoServingEngine if engines may come back, and RolloutAborted for any other failure,
        so that the run saves what it has learnt before it ends; Preempted instead of these if the
        scheduler wants the machine back.
        """
        raise NotImplementedError

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version."""

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """What a checkpoint holds: the groups of unfinished generations, their samples so far, and
        the finished generations. Empty if the checkpoint waits for generations (`may_be_saved`)."""
        return None, None, {}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint, before anything is begun or resumed."""

    def close(self) -> None:
        """Cancel the generations in progress, since their rollouter is about to be closed."""


class RolloutRunner(Runner):
    """Makes generations, each by itself; see `Runner`."""

    def __init__(self, rollouter: Rollouter, watchdog: Watchdog, timeline: Timeline) -> None:
        self._rollouter, self._watchdog, self._timeline = rollouter, watchdog, timeline
        self.in_flight = rollouter.in_flight
        self._rollouts: dict[int, Rollout] = {}
        """The generations in progress, by number."""
        self._groups: dict[int, list[ScoredGroup | Unscored]] = defaultdict(list)
        self._engines: dict[int, set[str]] = defaultdict(set)
        """What a checkpoint holds of generations, until they are begun: their groups, and the
        addresses of the engines that had answered."""

    def begin(self, request: RolloutRequest) -> None:
        """Begin a generation; one whose engines were lost continues if the request is the same."""
        number = request.generation
        rollout = self._rollouts.get(number)
        if rollout is None or rollout.request != request:
            if rollout is not None:
                rollout.abandon()
            rollout = self._rollouts[number] = Rollout(self._rollouter, request)
            if groups := self._groups.pop(number, None):
                rollout.restore(groups, self._engines[number])
        rollout.start(self._timeline)

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait for a generation and return it."""
        with (
            preempted_instead(lambda: self._watchdog.is_preempted),
            as_rollout_aborted(f"generation {generation}"),
        ):
            batch = self._rollouts[generation].finish(timer)
        del self._rollouts[generation]
        return batch

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version; generations that failed for lack of an engine are
        submitted again."""
        if not self.in_flight:
            return
        self.in_flight.resume(policy_version)
        for rollout in self._rollouts.values():
            made = rollout.made
            if made and made.done() and isinstance(made.exception(), NoServingEngine):
                rollout.start(self._timeline)

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        """What a checkpoint holds of the generations in progress."""
        if not may_be_saved(self._rollouter.cfg):
            return super().open_groups()
        assert self.in_flight is not None
        with self.in_flight.suspended():
            return self._open_groups()

    def _open_groups(self) -> tuple[OpenGroups, Experience | None, dict[int, RolloutBatch]]:
        complete: dict[int, RolloutBatch] = {}
        groups: dict[int, list[Sample]] = {}
        scored: dict[int, ScoredGroup] = {}
        engines: dict[int, tuple[str, ...]] = {}
        for generation, rollout in self._rollouts.items():
            made = rollout.made
            if made and made.done() and not made.exception():
                complete[generation] = made.result()
            elif isinstance(requests := rollout.open, CompletionRequests):
                prompts = self._rollouter.stream.batch(generation)
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
            self._groups[place // size].append(group)
        for place, urls in saved.engines:
            self._engines[place // size].update(urls)

    def close(self) -> None:
        """Cancel the generations in progress, since their rollouter is about to be closed."""
        if futures := [rollout.made for rollout in self._rollouts.values() if rollout.made]:
            self._rollouter.cancel()
            wait(futures)
