"""Makes generations from groups, each sampled and scored by a coroutine. Rank 0 only."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count

from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.experience import Experience, compute_advantages
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints.trainer_state import OpenGroups, TrainerState
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import first_seed
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.group import Group, features_of
from megatron_grpo.rollout.generation import (
    Attempt,
    Generation,
    RolloutBatch,
    Runner,
    ScoredGroup,
    as_rollout_aborted,
)
from megatron_grpo.rollout.group_queue import GroupKey, GroupQueue
from megatron_grpo.rollout.saved_groups import Unscored, experience_of, groups_of, may_be_saved
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import IDLE, WAIT, PhaseTimer, Timeline
from megatron_grpo.watchdog import Watchdog

NUM_READ_AT_ONCE = 64
"""Groups whose images are read together before their requests begin, with over-sampling."""
PRIORITIES = 1 << 32
"""Priorities of a generation: more than it has samples."""
Taken = tuple[Generation, list[Attempt], list[Attempt]]
"""(generation, its groups, replaced groups)."""


class GenerationRunner(Runner):
    """Has engines sample the groups that a `GroupQueue` opens.

    Each group is a coroutine, `_make_group`: it requests samples, has them scored, and reports to
    the queue, which may open others. It lives on through pushes of weights and losses of engines:
    its requests wait at the router meanwhile. All state belongs to the event loop; the main thread
    calls the public methods and waits for them.
    """

    def __init__(
        self,
        services: RolloutServices,
        watchdog: Watchdog,
        timeline: Timeline,
        state: TrainerState,
    ) -> None:
        self._services, self._watchdog, self._timeline = services, watchdog, timeline
        self._cfg = cfg = services.cfg
        self._router, self._call = services.router, services.loop.call
        self._schedule = schedule = BatchSchedule.of(cfg.grpo)
        self._batch_of = lru_cache(64)(services.stream.batch)
        self._replacements: dict[GroupKey, Prompt] = {}
        """Prompts of the groups that rounds of dynamic sampling open."""
        self._num_generations = -(-cfg.num_steps // schedule.updates_per_generation)
        # Finished generations in the checkpoint count as taken.
        self._num_taken = state.step // schedule.updates_per_generation + len(state.ready)
        self._over_samples = cfg.rollout.over_sampling > 1
        self._is_ahead, self._advantages = cfg.rollout.max_staleness > 0, AdvantageFunction.of(cfg)
        size, groups = schedule.num_prompts, state.groups
        self._queue = queue = GroupQueue(
            size=size,
            max_staleness=cfg.rollout.max_staleness,
            row_of=lambda key: self._prompt(key).index,
            num_wanted=round(cfg.rollout.over_sampling * size) if self._over_samples else None,
            most_rounds=cfg.grpo.max_resample_times if cfg.grpo.dynamic_sample else 0,
            widening=cfg.grpo.dynamic_sample_oversampling,
            next_number=groups.next_number if groups else self._num_taken * size,
        )
        if groups and self._over_samples:
            queue.reopened = [*map(queue.key_of, groups.untaken)]
        self._attempts: dict[GroupKey, Attempt] = {}
        """Attempts at groups that no generation has taken, by key."""
        self._saved: dict[GroupKey, ScoredGroup | Unscored] = {}
        self._saved_engines: dict[GroupKey, tuple[str, ...]] = {}
        """Addresses of engines that sampled a checkpoint's groups, until the groups are opened."""
        self._restored: list[GroupKey] = []
        """Groups of a checkpoint that are open in the queue; the first `resume` begins them."""
        self._generations: dict[int, Generation] = {}
        """Generations in progress, by number; with over-sampling, the next one to be taken."""
        self._places: dict[int, count[int]] = defaultdict(count)
        """Counters of opened groups by generation, for priorities; only 0 with over-sampling."""
        self._policy_version = state.step
        if self._over_samples:
            self._generations[self._num_taken] = Generation(state.step)

    def begin(self, generation: int, policy_version: int) -> None:
        if not self._over_samples:
            self._call(self._begin(generation, policy_version))

    def finish(self, generation: int, timer: PhaseTimer) -> RolloutBatch:
        with as_rollout_aborted(f"generation {generation}", lambda: self._watchdog.is_preempted):
            with timer.phase(WAIT) if self._is_ahead else nullcontext():  # 0 s, if it is complete
                phase = self._call(self._phase_after(generation, None))
            while phase:  # by phase, since the watchdog has a limit for each
                name = (WAIT, phase) if self._is_ahead else (phase,)
                with timer.phase(*name):
                    phase = self._call(self._phase_after(generation, phase))
            return self._batch(generation, *self._call(self._take(generation)))

    def pause(self, next_version: int) -> None:
        self._call(self._router.pause(next_version))

    def abort(self) -> None:
        self._call(self._router.abort())

    def resume(self, policy_version: int) -> None:
        """Continue with weights of this version; groups that are too old for it are dropped."""
        if self._cfg.rollout.in_flight_updates:
            self._call(self._resume(policy_version))

    def open_groups(self) -> tuple[OpenGroups | None, Experience | None, dict[int, RolloutBatch]]:
        if not may_be_saved(self._cfg):
            return super().open_groups()
        groups, samples, complete = self._call(self._open_groups())
        return groups, samples, {n: self._batch(n, *each) for n, each in complete.items()}

    def restore(self, saved: OpenGroups, samples: Experience) -> None:
        """Restore the groups of a checkpoint; each continues when it is opened."""
        key_of = self._queue.key_of
        self._saved = {key_of(number): group for number, group in groups_of(samples).items()}
        self._saved_engines = {key_of(number): urls for number, urls in saved.engines}
        if self._over_samples:
            opened_at = {key_of(number): then for number, then in saved.asked_at}
            self._queue.restore(opened_at)
            self._restored = sorted(opened_at, key=lambda key: (opened_at[key], key))

    def close(self) -> None:
        self._call(self._close())

    def _batch(
        self,
        number: int,
        generation: Generation,
        taken: Sequence[Attempt],
        rejected: Sequence[Attempt],
    ) -> RolloutBatch:
        """Make the batch for training; in the main thread, as it may be large."""
        groups = [each.scored for each in taken if each.scored]
        experience = compute_advantages(
            [sample for group in groups for sample in group.samples],
            [reward for group in groups for reward in group.rewards],
            [total for group in groups for total in group.totals],
            self._advantages,
        )
        metrics = generation.metrics(len(rejected), self._cfg.grpo)
        metrics["rollout/num_engines"] = len({url for each in taken for url in each.group.engines})
        if self._over_samples:
            began = min(each.began for each in taken)
            seconds = max(each.ended for each in taken) - began
            about = {"generation": number, "policy_version": self._policy_version}
            self._timeline.add_rollout("generate", began, seconds, **about)
            metrics |= {"rollout/dropped_stale": generation.num_dropped, "time/generate": seconds}
        elif self._is_ahead:
            metrics |= {f"time/{phase}": each for phase, each in generation.seconds.items()}
        return RolloutBatch(experience, metrics, [each.scored for each in rejected if each.scored])

    # In the event loop

    async def _begin(self, number: int, version: int) -> None:
        found = self._generations.get(number)
        # Called again after lost engines and a push: a generation has samples of one version here.
        if found and found.policy_version != version:
            self._drop(self._queue.drop_generation(number))
            found = None
        if found is None:
            self._policy_version = version
            generation = self._generations[number] = Generation(version)
            if self._is_ahead:
                generation.record = partial(
                    self._timeline.add_rollout, generation=number, policy_version=version
                )
            await self._open(self._queue.open_generation(number, number))
        if not self._cfg.rollout.in_flight_updates:
            await self._router.resume(version)

    async def _resume(self, policy_version: int) -> None:
        self._policy_version = policy_version
        if self._over_samples:
            dropped = self._queue.drop_stale(self._now)
            self._generations[self._num_taken].num_dropped += len(dropped)
            self._drop(dropped)
        await self._router.resume(policy_version)
        if self._over_samples:
            restored, self._restored = self._restored, []
            await self._open(restored)
            await self._open_new()

    async def _take(self, number: int) -> Taken:
        generation = self._generations[number]
        if generation.failure:
            raise generation.failure
        if not self._cfg.rollout.in_flight_updates:
            await self._router.abort()
            if self._router.failure:  # for example, an engine's weights changed meanwhile
                raise self._router.failure
        # Raise before the groups are taken: the checkpoint at the end of the run keeps them.
        generation.check_failed(self._cfg.reward)
        keys, replaced = self._queue.pop_generation(number)
        taken = [self._attempts.pop(key) for key in keys]
        # Not `_drop`, which cancels tasks: the task of a rejected group may be opening a new one.
        rejected = [self._attempts.pop(key) for key in replaced]
        for key in (*keys, *replaced):
            self._replacements.pop(key, None)
        del self._generations[number]
        self._num_taken += 1
        if self._over_samples:
            self._generations[self._num_taken] = Generation(self._policy_version)
            await self._open_new()
        return generation, taken, rejected

    async def _close(self) -> None:
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task]
        self._drop([*self._attempts])
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _now(self) -> int:
        """Number of the generation that training with the engines' weights would begin."""
        return self._schedule.cursor(self._policy_version).generation

    def _generation_of(self, key: GroupKey) -> Generation:
        return self._generations[self._num_taken if self._over_samples else key.generation]

    def _prompt(self, key: GroupKey) -> Prompt:
        if key.round:
            return self._replacements[key]
        return self._batch_of(key.generation)[key.position]

    async def _open_new(self) -> None:
        """Open as many groups as the queue wants, with over-sampling."""
        limit = (self._num_generations - self._num_taken) * self._schedule.num_prompts
        await self._open(self._queue.open_new(self._now, limit))

    async def _open(self, keys: Sequence[GroupKey]) -> None:
        """Begin groups that the queue has opened."""
        # In order, all at the same time: then an engine's batches are repeatable. With
        # over-sampling, the first groups need not wait for the images of all.
        step = NUM_READ_AT_ONCE if self._over_samples else max(1, len(keys))
        for i in range(0, len(keys), step):
            own = {key: self._prompt(key) for key in keys[i : i + step]}
            unscored = [key for key in own if not isinstance(self._saved.get(key), ScoredGroup)]
            features = await features_of([own[key] for key in unscored])
            for key, prompt in own.items():
                # During the await the group may have been dropped as too old, or opened again.
                if key in self._attempts or key not in self._queue.opened_at:
                    continue
                group = self._new_group(key, prompt, features.get(prompt.images))
                attempt = self._attempts[key] = Attempt(group)
                if key not in self._saved or not self._is_restored(key, attempt):
                    generation = self._generation_of(key)
                    generation.num_sampling += 1
                    generation.enter_phase()
                    attempt.task = asyncio.create_task(self._make_group(key, attempt))

    def _new_group(self, key: GroupKey, prompt: Prompt, features: Json | None) -> Group:
        first = self._services.params
        seed = first.seed
        if key.round:  # other seeds than the prompt at this position; no other position is below 0
            seed = first_seed(seed, key.generation, -key.round)
        params = replace(
            first,
            own_temperature=self._cfg.grpo.dynamic_sample_temperature if key.round == 1 else None,
            policy_version=self._policy_version,
            seed=seed,
            series=key.generation,
            position=key.position,
        )
        # Earlier generations go first; with over-sampling, groups that were opened earlier.
        generation = 0 if self._over_samples else key.generation
        priority = generation * PRIORITIES + next(self._places[generation]) * params.num_generations
        return self._services.groups[prompt.source](prompt, params, priority, features)

    def _is_restored(self, key: GroupKey, attempt: Attempt) -> bool:
        """Restore a group from the checkpoint; returns whether it is scored already."""
        saved, group = self._saved.pop(key), attempt.group
        group.engines.update(self._saved_engines.pop(key, ()))
        if not isinstance(saved, ScoredGroup):
            group.restore(saved)
            return False
        attempt.scored, attempt.ended = saved, time.time()
        if not self._over_samples:  # with over-sampling, the run that was saved has counted it
            self._generation_of(key).add(saved, self._cfg.grpo)
        self._queue.complete(key)
        return True

    async def _make_group(self, key: GroupKey, attempt: Attempt) -> None:
        """Have a group sampled and scored, then complete or reject it in the queue."""
        group, cfg = attempt.group, self._cfg
        try:
            samples = await group.sample(self._router)
            generation = self._generation_of(key)
            generation.num_sampling -= 1
            generation.num_scoring += 1
            generation.enter_phase()
            self._router.changed.give()  # wakes `finish`, which waits for another phase
            if not self._is_ahead:  # score all at once: idle servers of reward models may sleep
                await generation.sampled.wait()
            scored = attempt.scored = await self._services.scorer.score(samples, group.priority)
            attempt.ended = time.time()
            generation = self._generation_of(key)  # over-sampling: perhaps a later one by now
            generation.num_scoring -= 1
            if group.failures:
                generation.unreported.append(group)
            if not generation.add(scored, cfg.grpo):
                self._queue.complete(key)
            elif self._queue.reject(key) and self._over_samples:
                await self._open_new()
            if not (self._over_samples or generation.num_sampling or generation.num_scoring):
                await self._end_round(key.generation)
        except Exception as error:  # any: nobody awaits this task, so `finish` must raise it
            generation = self._generation_of(key)
            generation.failure = generation.failure or error
        self._router.changed.give()

    async def _end_round(self, number: int) -> None:
        """Open the next round if groups are missing; all groups of the last round are scored."""
        generation, stream = self._generations[number], self._services.stream
        last = self._queue.rounds[number]
        own = [key for key in self._attempts if (key.generation, key.round) == (number, last)]
        generation.check_failed(self._cfg.reward)
        if missing := self._queue.num_missing(number):
            tried = {self._prompt(key).index for key in self._attempts if key.generation == number}
            prompts = stream.others(tried, missing, number, last + 1)
            if last == 0 and self._cfg.grpo.dynamic_sample_temperature:  # the same, at that
                prompts = [self._prompt(key) for key in own if key not in self._queue.opened_at]
            keys = self._queue.open_round(number, len(prompts), number)
            self._replacements |= zip(keys, prompts, strict=True)
            is_alone = bool(keys) and not self._cfg.rollout.in_flight_updates
            # Engines are empty when a synchronous round begins: then its batches are repeatable.
            if is_alone:
                await self._router.abort()
            await self._open(keys)
            if is_alone:
                await self._router.resume(self._policy_version)
        generation.enter_phase()

    async def _phase_after(self, number: int, last: str | None) -> str:
        """Wait for the end of phase `last`; returns the next phase, IDLE when the generation can be
        taken or has failed."""
        await self._router.until(lambda: self._phase(number) != last)
        return self._phase(number)

    def _phase(self, number: int) -> str:
        generation = self._generations[number]
        if generation.failure:
            return IDLE
        # `next_generation` walks over all groups, and this is called at every notice.
        if generation.phase and not self._over_samples:
            return generation.phase
        if self._queue.next_generation(number) is not None:
            return IDLE
        return "generate" if self._over_samples else "score"

    def _drop(self, keys: Sequence[GroupKey]) -> None:
        """Forget groups and cancel their requests."""
        for key in keys:
            self._replacements.pop(key, None)
            attempt = self._attempts.pop(key, None)
            if attempt and attempt.task:
                attempt.task.cancel()

    async def _open_groups(self) -> tuple[OpenGroups, Experience | None, dict[int, Taken]]:
        was_running = self._router.is_running
        await self._router.abort()  # the engines then return the tokens sampled so far
        queue, attempts, opened_at = self._queue, self._attempts, self._queue.opened_at
        complete: dict[int, Taken] = {}  # generations that can be taken whole
        for number, generation in () if self._over_samples else sorted(self._generations.items()):
            keys = queue.next_generation(number)
            if keys is not None and not generation.failure:
                complete[number] = generation, [attempts[key] for key in keys], []
        found: dict[int, ScoredGroup | Unscored] = {}
        for key in queue.untaken:
            if key.generation not in complete and (attempt := attempts.get(key)):
                found[queue.number_of(key)] = attempt.scored or attempt.group.so_far()
        saved = OpenGroups(
            next_number=queue.next_number,
            untaken=tuple(
                queue.number_of(k) for k in queue.untaken if k.generation not in complete
            ),
            asked_at=tuple((n, opened_at[queue.key_of(n)]) for n in found if found[n]),
            engines=tuple(
                (n, tuple(sorted(attempts[queue.key_of(n)].group.engines))) for n in found
            ),
        )
        if was_running:
            await self._router.resume(self._router.policy_version)
        return saved, experience_of(found), complete
