"""Scores groups as soon as they are complete, while the engines work on others. Rank 0 only.

A group is all completions of one prompt. Reward functions get one group in each call, so they give
the same scores as for a whole generation at once; only the order of the calls depends on time.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from megatron_grpo.data.samples import Sample
from megatron_grpo.rollout.dynamic_sampling import ScoredGroup
from megatron_grpo.workers.child_process import COLLECTOR

Group = Sequence[Sample]

GATHER_SECONDS = 0.05
"""Completions that end in one step of an engine arrive within this: the first group of them is not
to be scored alone, as the others would wait for it."""


class GroupScorer:
    """Has `score` score groups, in a thread of its own, until `close`: together all those that are
    complete when the ones before them are scored. After a failure, it is raised for all others."""

    def __init__(self, score: Callable[[Group], list[ScoredGroup]]) -> None:
        self._score = score
        self._waiting: list[tuple[Group, Future[ScoredGroup]]] = []
        self._lock = Lock()
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=COLLECTOR)

    def submit(self, groups: Sequence[Group]) -> list[Future[ScoredGroup]]:
        """Have these scored; from any thread."""
        futures: list[Future[ScoredGroup]] = [Future() for _ in groups]
        with self._lock:
            self._waiting += zip(groups, futures, strict=True)
        self._thread.submit(self._score_waiting)
        return futures

    def close(self) -> None:
        """End the thread, once what was submitted is scored or its scoring cancelled."""
        self._thread.shutdown()

    def _score_waiting(self) -> None:
        while found := self._take():
            groups, futures = zip(*found, strict=True)
            try:
                if self._failure:
                    raise self._failure
                scored = self._score([sample for group in groups for sample in group])
            except Exception as error:  # of any kind: it must reach who waits for the groups
                self._failure = error
                for future in futures:
                    future.set_exception(error)
            else:
                for future, each in zip(futures, scored, strict=True):
                    future.set_result(each)

    def _take(self) -> list[tuple[Group, Future[ScoredGroup]]]:
        """What is scored next; nothing if it was scored with what came before."""
        if self._waiting:
            time.sleep(GATHER_SECONDS)
        with self._lock:
            first: dict[int, tuple[Group, Future[ScoredGroup]]] = {}
            left = []
            for each in self._waiting:
                # Of two generations, those of one prompt would be taken for one group.
                if first.setdefault(each[0][0].prompt.index, each) is not each:
                    left.append(each)
            self._waiting = left
        return [*first.values()]
