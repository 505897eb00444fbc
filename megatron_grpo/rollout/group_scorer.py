"""Scores groups, that is, all completions of one prompt. Rank 0 only.

Reward functions get one group in each call. So the groups of a generation that is made ahead are
scored as soon as each is complete, while the engines work on others. The scores are the same as at
its end; only the order of the calls differs.
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

Group = Sequence[Sample]

GATHER_SECONDS = 0.05
"""Groups that end in one step of an engine arrive within this time, and are scored together."""


@dataclass(frozen=True)
class Waiting:
    """A group that is to be scored."""

    order: int
    """Lower numbers go first."""
    group: Group
    scored: Future[ScoredGroup] = field(default_factory=Future)


class GroupScorer:
    """Scores groups in the calling thread (`score`), or in a thread of its own until `close`
    (`submit`).

    The thread scores together the groups that have become complete by its next turn, as many as
    there can be calls at a time. After a failure there, all later groups fail with the same error.
    """

    def __init__(self, cfg: Config, rewards: RewardsBySource, decode: Decode) -> None:
        self._cfg, self._rewards, self._decode = cfg, rewards, decode
        rewards_of = [view.reward for view in cfg.by_source.values()]
        self._most = max(max(each.max_concurrent_calls, each.num_workers) for each in rewards_of)
        """Most groups scored together: few, so that those of an earlier generation soon have their
        turn."""
        self._waiting: list[Waiting] = []
        self._lock = Lock()
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    def score(self, samples: Sequence[Sample]) -> list[ScoredGroup]:
        """The groups of these samples, which are ordered by prompt, with their rewards."""
        # The limit on failures is a share of a whole generation, also in a round that replaces a
        # few prompts.
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
        """Score `groups` in the thread, after those of a lower `order`; may be called from any
        thread.

        A group whose future is cancelled before its turn is not scored.
        """
        waiting = [Waiting(order, group) for group in groups]
        with self._lock:
            self._waiting += waiting
        self._thread.submit(self._score_waiting)
        return [each.scored for each in waiting]

    def close(self) -> None:
        """End the thread after all submitted groups are scored or cancelled."""
        self._thread.shutdown()

    def _score_waiting(self) -> None:
        while found := self._next_groups():
            try:
                if self._failure:
                    raise self._failure
                scored = self.score([sample for each in found for sample in each.group])
                pairs = [*zip(found, scored, strict=True)]
            except Exception as error:  # of any kind: the futures must raise it
                self._failure = error
                for each in found:
                    each.scored.set_exception(error)
            else:
                for each, group in pairs:
                    each.scored.set_result(group)

    def _next_groups(self) -> list[Waiting]:
        """The groups to score next; none if all were scored together with earlier ones."""
        if self._waiting:
            time.sleep(GATHER_SECONDS)
        with self._lock:
            found: dict[int, Waiting] = {}
            left = []
            for each in sorted(self._waiting, key=lambda each: each.order):
                # Two groups of one prompt, from two generations, would be scored as one.
                index, is_full = each.group[0].prompt.index, len(found) == self._most
                if index in found or is_full:
                    left.append(each)
                elif each.scored.set_running_or_notify_cancel():
                    found[index] = each
            self._waiting = left
        return [*found.values()]


class EarlyScores:
    """The scores of one generation, whose groups are scored as soon as each is complete."""

    def __init__(self, scorer: GroupScorer, generation: int) -> None:
        self._scorer, self._generation = scorer, generation
        self._groups: dict[int, Future[ScoredGroup]] = {}
        """By the index of the prompt."""

    def begin(self, *groups: Group) -> None:
        """Begin to score complete groups; may be called from any thread."""
        futures = self._scorer.submit(groups, self._generation)
        for group, future in zip(groups, futures, strict=True):
            self._groups[group[0].prompt.index] = future

    def scored_groups(self, samples: Sequence[Sample]) -> list[ScoredGroup]:
        """The scored groups of all samples of a round; raises what scoring raises."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.index, []).append(sample)
        # Groups that a checkpoint held complete but not scored, and those whose agents ended last.
        self.begin(*(group for index, group in groups.items() if index not in self._groups))
        return [self._groups[index].result() for index in groups]

    def so_far(self) -> dict[int, ScoredGroup]:
        """The groups scored so far, by the index of their prompt; may be called from any thread."""
        return {
            index: future.result()
            for index, future in self._groups.copy().items()
            if future.done() and not future.cancelled() and not future.exception()
        }

    def restore(self, groups: Iterable[ScoredGroup]) -> None:
        """Take over the groups that were scored when a checkpoint was saved."""
        for group in groups:
            future = self._groups[group.samples[0].prompt.index] = Future()
            future.set_result(group)

    def abandon(self) -> None:
        """Cancel the scoring of all groups that have not had their turn."""
        for future in self._groups.copy().values():
            future.cancel()
