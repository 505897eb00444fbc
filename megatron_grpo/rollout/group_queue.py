"""Queue of groups: opens them for the engines, and takes generations from the complete ones.

In order (without `rollout.over_sampling`), a generation is made of the groups of its own prompts.
Those that dynamic sampling rejects are replaced in rounds, each as soon as all groups of the last
one are scored: so the prompts that are tried depend on nothing but the generation's number and the
rewards.

With over-sampling, more groups are at the engines than a generation needs. A generation is made of
the first groups that are complete; the others continue into the next one, until they would be too
old for any. Another group is opened for each one that is rejected, at once.

There are no engines, threads or clocks here: the queue only counts, so a test can drive it through
any order of events.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class GroupKey(NamedTuple):
    """Names a group: by its place in a generation, or in a round that replaces prompts of it. Keys
    sort in the order in which groups are opened."""

    generation: int
    round: int
    """0: the prompts that the stream has for the generation."""
    position: int


@dataclass
class GroupQueue:
    """Groups by key: open, complete, or to be opened.

    `now` is the generation that the engines' weights are about to be trained on. A group that was
    opened at one generation may be trained on in that one and in the next `max_staleness`.
    """

    size: int
    """Groups in a generation; no two of them have the same prompt."""
    max_staleness: int
    row_of: Callable[[GroupKey], int]
    """The row of the data that a group's prompt comes from."""
    num_wanted: int | None = None
    """Groups that are open or complete at a time: `over_sampling` times `size`, at least that.
    None: generations are made in order."""
    most_rounds: int = 0
    """Rounds that replace groups; with over-sampling, so many times `size` groups are replaced."""
    widening: float = 1.0
    """Groups that a round opens for each one that is missing."""
    next_number: int = 0
    """The place in the stream of the first group that was never opened."""
    reopened: list[GroupKey] = field(default_factory=list)
    """Groups to open before any new one: dropped as too old, or open when a run was saved."""

    def __post_init__(self) -> None:
        self.opened_at: dict[GroupKey, int] = {}
        """The generation at which each open or complete group was opened."""
        self.rounds: dict[int, int] = defaultdict(int)
        """Rounds that each generation has had so far; in order only."""
        self._complete: set[GroupKey] = set()
        self._rejected: dict[int, list[GroupKey]] = defaultdict(list)
        """Rejected groups by generation, in order: they fill it up if no round finds enough."""

    def key_of(self, number: int) -> GroupKey:
        """The group of round 0 at a place in the stream of prompts."""
        generation, position = divmod(number, self.size)
        return GroupKey(generation, 0, position)

    def number_of(self, key: GroupKey) -> int:
        assert key.round == 0, "replacements have no place in the stream"
        return key.generation * self.size + key.position

    @property
    def untaken(self) -> list[GroupKey]:
        """Groups, opened or to be opened, that no generation has taken."""
        return sorted([*self.opened_at, *self.reopened])

    def open_generation(self, generation: int, now: int) -> list[GroupKey]:
        """Open the groups of a generation; in order only."""
        self.next_number = max(self.next_number, (generation + 1) * self.size)
        new = [GroupKey(generation, 0, position) for position in range(self.size)]
        self.opened_at |= dict.fromkeys(new, now)
        return new

    def num_missing(self, generation: int) -> int:
        """Number of groups that a generation's next round is to open; 0 while the last one goes on,
        and when the generation is complete. In order only."""
        is_open, complete = self._groups_of(generation)
        missing = self.size - len(complete)
        if is_open or missing <= 0 or self.rounds[generation] >= self.most_rounds:
            return 0
        return math.ceil(missing * self.widening)

    def open_round(self, generation: int, count: int, now: int) -> list[GroupKey]:
        """Open `count` groups of the next round; 0 if there are no other prompts to try."""
        number = self.rounds[generation] + 1 if count else self.most_rounds
        self.rounds[generation] = number
        new = [GroupKey(generation, number, position) for position in range(count)]
        self.opened_at |= dict.fromkeys(new, now)
        return new

    def open_new(self, now: int, limit: int) -> list[GroupKey]:
        """Open groups until `num_wanted`, at most `limit`, are open or complete, or more where
        prompts repeat, so that a generation can always be filled; with over-sampling only. `limit`
        is a multiple of `size`."""
        assert self.num_wanted is not None
        new = []
        rows = {self.row_of(key) for key in self.opened_at}
        most = min(limit, self.num_wanted)
        while limit and (len(self.opened_at) < most or len(rows) < self.size):
            if self.reopened:
                key = self.reopened.pop(0)
            else:
                key, self.next_number = self.key_of(self.next_number), self.next_number + 1
            self.opened_at[key] = now
            new.append(key)
            rows.add(self.row_of(key))
        return new

    def restore(self, opened_at: Mapping[GroupKey, int]) -> None:
        """Open the groups of a checkpoint that have samples, each at its generation."""
        self.reopened = [key for key in self.reopened if key not in opened_at]
        self.opened_at |= opened_at

    def complete(self, key: GroupKey) -> None:
        assert key in self.opened_at, "it is open"
        self._complete.add(key)

    def reject(self, key: GroupKey) -> bool:
        """Have an open group replaced, or make it `complete` and return False if as many were
        replaced as may be."""
        # -1: with over-sampling, groups belong to no generation until one takes them.
        generation = key.generation if self.num_wanted is None else -1
        if self.num_wanted and len(self._rejected[generation]) >= self.most_rounds * self.size:
            self.complete(key)
            return False
        del self.opened_at[key]
        self._rejected[generation].append(key)
        return True

    def next_generation(self, generation: int) -> list[GroupKey] | None:
        """The groups of a generation, which is the next one to be taken; None as long as there are
        too few."""
        if self.num_wanted is None:
            is_open, complete = self._groups_of(generation)
            if is_open or self.num_missing(generation):
                return None
            found = [*complete, *sorted(self._rejected[generation])]
            return found[: self.size] if len(found) >= self.size else None
        taken: dict[int, GroupKey] = {}
        # Oldest first: they would be the next to be dropped as too old.
        for key in sorted(self._complete, key=lambda each: (self.opened_at[each], each)):
            taken.setdefault(self.row_of(key), key)
        return sorted([*taken.values()][: self.size]) if len(taken) >= self.size else None

    def pop_generation(self, generation: int) -> tuple[list[GroupKey], list[GroupKey]]:
        """Remove the groups of the `next_generation`; returns them, and those that were replaced
        since the last one."""
        keys = self.next_generation(generation)
        assert keys is not None, "it was looked at"
        rejected = self._rejected.pop(generation if self.num_wanted is None else -1, [])
        spare = self._groups_of(generation)[1] if self.num_wanted is None else []
        # `keys` may have rejected groups, and a widened round leaves spare ones.
        for key in {*keys, *spare} & self._complete:
            self._complete.remove(key)
            del self.opened_at[key]
        self.rounds.pop(generation, None)
        return keys, sorted({*rejected, *spare} - {*keys})

    def drop_generation(self, generation: int) -> list[GroupKey]:
        """Forget a generation that is to be made from other weights; returns its groups."""
        dropped = [key for key in self.opened_at if key.generation == generation]
        dropped += self._rejected.pop(generation, [])
        self.rounds.pop(generation, None)
        for key in dropped:
            self.opened_at.pop(key, None)  # a rejected one is no more there
            self._complete.discard(key)
        return dropped

    def drop_stale(self, now: int) -> list[GroupKey]:
        """Drop groups that are too old for generation `now`; they will be opened again."""
        dropped = sorted(
            key for key, then in self.opened_at.items() if then < now - self.max_staleness
        )
        for key in dropped:
            del self.opened_at[key]
            self._complete.discard(key)
        self.reopened = sorted([*self.reopened, *dropped])
        return dropped

    def _groups_of(self, generation: int) -> tuple[bool, list[GroupKey]]:
        """Whether groups of a generation are open, and those that are complete, in order."""
        own = [key for key in self.opened_at if key.generation == generation]
        complete = [key for key in own if key in self._complete]
        return len(complete) < len(own), sorted(complete)
