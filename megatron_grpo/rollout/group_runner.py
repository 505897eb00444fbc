"""Makes generations of the groups that are complete first: `rollout.over_sampling`.

Rank 0 only. Every group is requested and scored by itself, so that scoring runs while the engines
work on others. Completions continue through pushes of weights, as with `rollout.in_flight_updates`.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import Condition

from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.trainer_state import OpenGroups, TrainerState
from megatron_grpo.data.images import read_images
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.engines.generation import CompletionRequests
from megatron_grpo.engines.http import NoServingEngine
from megatron_grpo.engines.in_flight import InFlight
from megatron_grpo.engines.sampling_params import image_features
from megatron_grpo.launch.process import preempted_instead
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup, Tally, as_experience
from megatron_grpo.rollout.generate import RolloutBatch
from megatron_grpo.rollout.group_queue import GroupQueue
from megatron_grpo.rollout.open_samples import experience_of, groups_of
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.rollout.runner import Runner, as_rollout_aborted
from megatron_grpo.timing import WAIT, PhaseTimer, Timeline
from megatron_grpo.watchdog import Watchdog

NUM_READ_AT_ONCE = 64
"""Number of groups whose images are read together before they are requested."""


@dataclass
class Attempt:
    """One attempt at a group, from its requests to its score."""

    key: int
    """The number of its requests at `InFlight`. It grows with each attempt: earlier ones have
    priority."""
    requests: CompletionRequests
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    scored: ScoredGroup | None = None


class GroupRunner(Runner):
    """Has as many groups at the engines as over-sampling allows; see `GroupQueue`.

    It begins no generations: it requests new groups as others leave.
    """

    in_flight: InFlight

    def __init__(
        self, rollouter: Rollouter, watchdog: Watchdog, timeline: Timeline, state: TrainerState
    ) -> None:
        assert rollouter.in_flight is not None, "the config needs rollout.in_flight_updates"
        self._rollouter, self.in_flight = rollouter, rollouter.in_flight
        self._watchdog, self._timeline, cfg = watchdog, timeline, rollouter.cfg
        self._cfg, self._schedule = cfg, BatchSchedule.of(cfg.grpo)
        self._batch_of = lru_cache(64)(rollouter.stream.batch)
        updates, size = self._schedule.updates_per_generation, self._schedule.num_prompts
        self._num_generations = -(-cfg.num_steps // updates)
        # Those that the checkpoint holds whole have been taken.
        self._num_taken = state.step // updates + len(state.ready)
        groups = state.groups
        self._queue = GroupQueue(
            size=size,
            num_wanted=round(cfg.rollout.over_sampling * size),
            max_staleness=cfg.rollout.max_staleness,
            row_of=lambda number: self._prompt(number).index,
            next_number=groups.next_number if groups else self._num_taken * size,
            requeued=[*groups.untaken] if groups else [],
        )
        self._attempts: dict[int, Attempt] = {}
        """By number, the attempt at each group that is open or complete."""
        self._lost: dict[int, Attempt] = {}
        """Attempts to submit at the next `resume`: no engine was left, or a checkpoint has a part
        of them."""
        self._num_attempts = 0
        self._begin_tally()
        self._policy_version = state.step
        self._failure: Exception | None = None
        self._changed = Condition()
        """Guards all of the above, and is notified when a group is complete or something fails."""

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        """Wait until enough groups are complete; raises what `Runner.finish` raises."""
        with (
            preempted_instead(lambda: self._watchdog.is_preempted),
            as_rollout_aborted(f"generation {generation}"),
            timer.phase(WAIT, "generate"),
            self._changed,
        ):
            while self._queue.next_generation() is None:
                if self._failure:
                    raise self._failure
                self._changed.wait()
            # Before a generation takes them: the checkpoint at the end of the run has the groups.
            self._tally.check_failed(self._cfg.reward)
            self._num_taken += 1
            numbers = self._queue.pop_generation() or []
            batch = self._batch(generation, [self._attempts.pop(number) for number in numbers])
            self._request_groups()
        return batch

    def resume(self, policy_version: int) -> None:
        """Continue with weights of that version, without the groups that are too old for it."""
        with self._changed:
            self._policy_version = policy_version
            if isinstance(self._failure, NoServingEngine):  # any other is the end of the run
                self._failure = None
            dropped = self._queue.drop_stale(self._now)
            self._num_dropped += len(dropped)
            keys = [self._attempts.pop(number).key for number in dropped]
        self.in_flight.give_up(keys)  # waits for what may need the lock
        self.in_flight.resume(policy_version)
        with self._changed:
            lost, self._lost = self._lost, {}
            for number, attempt in lost.items():
                if self._attempts.get(number) is attempt:
                    self._submit(number, attempt)
            self._request_groups()

    def open_groups(self) -> tuple[OpenGroups, Experience | None, dict[int, RolloutBatch]]:
        """What a checkpoint holds: the groups that no generation has taken, and their samples so
        far."""
        with self.in_flight.suspended(), self._changed:
            queue = self._queue
            each = {n: attempt.scored or attempt for n, attempt in sorted(self._attempts.items())}
            next_number, untaken, asked_at = queue.next_number, queue.untaken, queue.requested_at
            engines = {n: sorted(a.requests.engines.copy()) for n, a in self._attempts.items()}
        groups = {
            number: found if isinstance(found, ScoredGroup) else found.requests.so_far()
            for number, found in each.items()
        }
        samples = experience_of(groups)
        numbers = samples.group_ids.unique().tolist() if samples else []
        groups_saved = OpenGroups(
            next_number=next_number,
            untaken=tuple(untaken),
            asked_at=tuple((number, asked_at[number]) for number in numbers),
            engines=tuple((number, tuple(engines[number])) for number in numbers),
        )
        return groups_saved, samples, {}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint; the first `resume` submits those without scores."""
        asked_at, engines = dict(saved.asked_at), dict(saved.engines)
        with self._changed:
            self._queue.restore(asked_at)
            groups = groups_of(samples)
            numbers = sorted(groups, key=lambda each: (asked_at[each], each))
            for number, attempt in self._new_attempts(numbers):
                found = groups[number]
                attempt.requests.engines.update(engines.get(number, ()))
                if isinstance(found, ScoredGroup):
                    attempt.scored, attempt.ended = found, time.time()
                    self._queue.complete(number)
                else:
                    attempt.requests.restore(found)
                    self._lost[number] = attempt

    def close(self) -> None:
        """Cancel the groups in progress, since their rollouter is about to be closed."""
        self._rollouter.cancel()
        self.in_flight.end()

    @property
    def _now(self) -> int:
        """The generation that is trained on with the weights that the engines have."""
        return self._schedule.cursor(self._policy_version).generation

    def _prompt(self, number: int) -> Prompt:
        generation, position = divmod(number, self._schedule.num_prompts)
        return self._batch_of(generation)[position]

    def _request_groups(self) -> None:
        """Request as many groups as there is room for."""
        limit = (self._num_generations - self._num_taken) * self._schedule.num_prompts
        for number, attempt in self._new_attempts(self._queue.open_new(self._now, limit)):
            self._submit(number, attempt)

    def _new_attempts(self, numbers: Sequence[int]) -> Iterator[tuple[int, Attempt]]:
        """New attempts at groups, by number. Images are read for a few groups at a time, so that
        the first need not wait for all."""
        for i, number in enumerate(numbers):
            if i % NUM_READ_AT_ONCE == 0:
                some = numbers[i : i + NUM_READ_AT_ONCE]
                features = read_images((self._prompt(n).images for n in some), image_features)
            generation, position = divmod(number, self._schedule.num_prompts)
            params = self._rollouter.sampling_params(generation, 0, self._policy_version)
            params = replace(params, first_position=position)
            requests = CompletionRequests([self._prompt(number)], params, features)
            attempt = Attempt(self._num_attempts, requests)
            self._num_attempts += 1
            self._attempts[number] = attempt
            yield number, attempt

    def _submit(self, number: int, attempt: Attempt) -> None:
        if not attempt.requests.open:  # a checkpoint had all samples, but no scores
            self._score(number, attempt)
            return
        answered = self.in_flight.submit(attempt.key, attempt.requests, together=True)
        answered.add_done_callback(partial(self._take_answers, number, attempt))

    def _take_answers(self, number: int, attempt: Attempt, answered: Future[None]) -> None:
        """Score a group whose requests are answered; runs in the thread of `InFlight`."""
        if answered.cancelled():  # dropped
            return
        try:
            answered.result()
        except NoServingEngine as error:
            with self._changed:
                self._lost[number] = attempt
            self._fail(error)
        except Exception as error:  # of any kind: `finish` must raise it
            self._fail(error)
        else:
            self._score(number, attempt)

    def _score(self, number: int, attempt: Attempt) -> None:
        [made] = self._rollouter.scorer.submit([attempt.requests.samples()], attempt.key)
        made.add_done_callback(partial(self._take_score, number, attempt))

    def _take_score(self, number: int, attempt: Attempt, made: Future[ScoredGroup]) -> None:
        """Complete or reject a group that is scored; runs in the thread of the scorer."""
        try:
            self._end_attempt(number, attempt, made.result())
        except Exception as error:  # as above; also of the images of a group that is requested
            self._fail(error)

    def _end_attempt(self, number: int, attempt: Attempt, scored: ScoredGroup) -> None:
        with self._changed:
            if self._attempts.get(number) is not attempt:  # dropped in the meantime
                return
            attempt.scored, attempt.ended = scored, time.time()
            if self._rejects(scored):
                del self._attempts[number]
                self._queue.reject(number)
                self._rejected.append(scored)
                self._request_groups()
            else:
                self._queue.complete(number)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._failure is None or isinstance(self._failure, NoServingEngine):
                self._failure = error
            self._changed.notify_all()

    def _rejects(self, scored: ScoredGroup) -> bool:
        """Count a scored group; returns whether dynamic sampling replaces it."""
        most = self._cfg.grpo.max_resample_times * self._schedule.num_prompts
        return self._tally.add(scored, self._cfg.grpo) and len(self._rejected) < most

    def _begin_tally(self) -> None:
        """Count from now on for the next generation that is taken."""
        self._tally = Tally()
        self._rejected: list[ScoredGroup] = []
        self._num_dropped = 0
        """Groups that became too old."""

    def _batch(self, generation: int, attempts: Sequence[Attempt]) -> RolloutBatch:
        groups = [attempt.scored for attempt in attempts if attempt.scored]
        experience = as_experience(groups, self._cfg)
        began, ended = min(each.began for each in attempts), max(each.ended for each in attempts)
        about = {"generation": generation, "policy_version": self._policy_version}
        self._timeline.add_rollout("generate", began, ended - began, **about)
        metrics = self._tally.metrics(len(self._rejected), self._cfg.grpo) | {
            "rollout/num_engines": len(set().union(*(each.requests.engines for each in attempts))),
            "rollout/dropped_stale": self._num_dropped,
            "time/generate": ended - began,
        }
        batch = RolloutBatch(experience, metrics, self._rejected)
        self._begin_tally()
        return batch
