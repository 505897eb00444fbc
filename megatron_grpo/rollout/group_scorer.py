"""Scores groups: all completions of one prompt. Rank 0 only.

Reward functions get one group in each call. So the groups of a generation that is made ahead are
scored as soon as each is complete, while the engines work on others: they have the same scores as
at its end, and only the order of the calls depends on time.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from megatron_grpo.config.config import Config
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.by_source import RewardsBySource, totals_of
from megatron_grpo.rewards.scoring import Decode, with_steps
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup
from megatron_grpo.workers.child_process import COLLECTOR

Group = Sequence[Sample]

GATHER_SECONDS = 0.05
"""Completions that end in one step of an engine arrive within this: the first group of them is not
to be scored alone, as the others would wait for it."""


@dataclass(frozen=True)
class Waiting:
    """A group that is to be scored."""

    order: int
    """Those of lower numbers go first."""
    group: Group
    scored: Future[ScoredGroup] = field(default_factory=Future)


class GroupScorer:
    """Scores groups at once, or in a thread of its own, until `close`: there together those that
    are complete when the ones before them are scored, as many as there can be calls at once. After
    a failure in the thread, it is raised for all others."""

    def __init__(self, cfg: Config, rewards: RewardsBySource, decode: Decode) -> None:
        self._cfg, self._rewards, self._decode = cfg, rewards, decode
        rewards_of = [view.reward for view in cfg.by_source.values()]
        self._most = max(max(each.max_concurrent_calls, each.num_workers) for each in rewards_of)
        """Groups at a time, so that those of an earlier generation soon have their turn."""
        self._waiting: list[Waiting] = []
        self._lock = Lock()
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=COLLECTOR)

    def score(self, samples: Sequence[Sample]) -> list[ScoredGroup]:
        """The samples of several groups by prompt, with their rewards."""
        # In a round that only replaces prompts, too, the limit is a share of a whole generation.
        size = max(self._cfg.grpo.generation_batch_size, len(samples))
        rewards = self._rewards.score(samples, num_completions=size)
        samples = with_steps(samples, rewards, self._decode)
        totals = totals_of(samples, rewards, self._cfg)
        size = self._cfg.grpo.num_generations
        return [
            ScoredGroup(samples[i : i + size], rewards[i : i + size], totals[i : i + size])
            for i in range(0, len(samples), size)
        ]

    def submit(self, groups: Sequence[Group], order: int) -> list[Future[ScoredGroup]]:
        """Have these scored in the thread, after those of a lower `order`; from any thread.

        One that is cancelled before its turn is not scored.
        """
        waiting = [Waiting(order, group) for group in groups]
        with self._lock:
            self._waiting += waiting
        self._thread.submit(self._score_waiting)
        return [each.scored for each in waiting]

    def close(self) -> None:
        """End the thread, once what was submitted is scored or its scoring cancelled."""
        self._thread.shutdown()

    def _score_waiting(self) -> None:
        while found := self._take():
            try:
                if self._failure:
                    raise self._failure
                scored = self.score([sample for each in found for sample in each.group])
                pairs = [*zip(found, scored, strict=True)]
            except Exception as error:  # of any kind: it must reach who waits for the groups
                self._failure = error
                for each in found:
                    each.scored.set_exception(error)
            else:
                for each, group in pairs:
                    each.scored.set_result(group)

    def _take(self) -> list[Waiting]:
        """What is scored next; nothing if it was scored with what came before."""
        if self._waiting:
            time.sleep(GATHER_SECONDS)
        with self._lock:
            found: dict[int, Waiting] = {}
            left = []
            for each in sorted(self._waiting, key=lambda each: each.order):
                # Of two generations, those of one prompt would be taken for one group.
                index, is_full = each.group[0].prompt.index, len(found) == self._most
                if index in found or is_full:
                    left.append(each)
                elif each.scored.set_running_or_notify_cancel():
                    found[index] = each
            self._waiting = left
        return [*found.values()]


class EarlyScores:
    """The scores of the groups of one generation, of which some are made before it is complete."""

    def __init__(self, scorer: GroupScorer, generation: int) -> None:
        self._scorer, self._generation = scorer, generation
        self._groups: dict[int, Future[ScoredGroup]] = {}
        """By the index of their prompt, those that have begun to be scored."""

    def begin(self, *groups: Group) -> None:
        """Begin to score groups that are complete; from any thread."""
        futures = self._scorer.submit(groups, self._generation)
        for group, future in zip(groups, futures, strict=True):
            self._groups[group[0].prompt.index] = future

    def of(self, samples: Sequence[Sample]) -> list[ScoredGroup]:
        """All samples of a round by prompt, with their rewards; raises what scoring raises."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.index, []).append(sample)
        # Those that a checkpoint had whole, and those whose agents ended last.
        self.begin(*(group for index, group in groups.items() if index not in self._groups))
        return [self._groups[index].result() for index in groups]

    def so_far(self) -> dict[int, ScoredGroup]:
        """The groups that are scored, by the index of their prompt; from any thread."""
        return {
            index: future.result()
            for index, future in self._groups.copy().items()
            if future.done() and not future.cancelled() and not future.exception()
        }

    def go_on(self, groups: Iterable[ScoredGroup]) -> None:
        """Take over what those of another run had `so_far`."""
        for group in groups:
            future = self._groups[group.samples[0].prompt.index] = Future()
            future.set_result(group)

    def abandon(self) -> None:
        """Let no more groups be scored: nobody waits for them."""
        for future in self._groups.copy().values():
            future.cancel()
