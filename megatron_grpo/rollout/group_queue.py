"""Which prompts are at the engines, and which of them make up a generation, with over-sampling.

With `rollout.over_sampling` more groups are at the engines than a generation needs. A group is all
completions of one prompt. A generation is made of the first groups that are complete; the others
continue into the next one, until they would be too old for any. There are no engines, threads or
clocks here: the queue only counts, so a test can drive it through any order of events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class GroupQueue:
    """Groups by the number of their prompt in the stream: open, complete, or to be requested.

    `now` is the generation that the engines' weights are about to be trained on. A group that was
    requested at one generation may be trained on in that one and in the next `max_staleness`.
    """

    size: int
    """Groups in a generation; no two of them have the same prompt."""
    num_wanted: int
    """Groups that are open or complete at a time: `over_sampling` times `size`, at least that."""
    max_staleness: int
    row_of: Callable[[int], int]
    """The row of the data that a number's prompt comes from."""
    next_number: int = 0
    requeued: list[int] = field(default_factory=list)
    """Numbers to request before any new one: dropped as too old, or open when a run was saved."""

    def __post_init__(self) -> None:
        self._open: dict[int, int] = {}
        self._complete: dict[int, int] = {}
        """By number, the generation at which it was requested."""

    @property
    def untaken(self) -> list[int]:
        """All numbers below `next_number` that no generation has taken."""
        return sorted([*self._open, *self._complete, *self.requeued])

    def open_new(self, now: int, limit: int) -> list[int]:
        """Open groups until `num_wanted`, at most `limit`, are open or complete; returns the new
        ones.

        More are opened where prompts repeat, so that a generation can always be filled; `limit` is
        a multiple of `size`.
        """
        new = []
        rows = {self.row_of(number) for number in (*self._open, *self._complete)}
        most = min(limit, self.num_wanted)
        while limit and (len(self.requested_at) < most or len(rows) < self.size):
            if self.requeued:
                number = self.requeued.pop(0)
            else:
                number, self.next_number = self.next_number, self.next_number + 1
            self._open[number] = now
            rows.add(self.row_of(number))
            new.append(number)
        return new

    def restore(self, requested_at: Mapping[int, int]) -> None:
        """Restore the open groups of a checkpoint, with the generation at which each was
        requested."""
        self.requeued = [number for number in self.requeued if number not in requested_at]
        self._open |= requested_at

    @property
    def requested_at(self) -> dict[int, int]:
        """The generation at which each open or complete group was requested."""
        return self._open | self._complete

    def complete(self, number: int) -> None:
        """An open group is complete, and scored."""
        self._complete[number] = self._open.pop(number)

    def reject(self, number: int) -> None:
        """An open group is complete and rejected: no generation takes it."""
        del self._open[number]

    def next_generation(self) -> list[int] | None:
        """The groups of the next generation, the oldest complete ones; None if there are too
        few."""
        taken: dict[int, int] = {}
        for number in sorted(self._complete, key=lambda each: (self._complete[each], each)):
            taken.setdefault(self.row_of(number), number)
        if len(taken) < self.size:
            return None
        return sorted([*taken.values()][: self.size])

    def pop_generation(self) -> list[int] | None:
        """Remove the groups of the `next_generation`, and return them."""
        numbers = self.next_generation()
        for number in numbers or ():
            del self._complete[number]
        return numbers

    def drop_stale(self, now: int) -> list[int]:
        """Drop groups that are too old for generation `now`; they will be requested again."""
        dropped = sorted(
            n for n, then in self.requested_at.items() if then < now - self.max_staleness
        )
        for number in dropped:
            self._open.pop(number, None)
            self._complete.pop(number, None)
        self.requeued = sorted([*self.requeued, *dropped])
        return dropped
