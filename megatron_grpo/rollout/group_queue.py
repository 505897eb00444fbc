"""Queue of groups: decides which groups to open, and which complete groups form a generation.

In order (without `rollout.over_sampling`), a generation has the groups of its own prompts. Dynamic
sampling replaces rejected groups in rounds; a round is opened when all groups of the last one are
scored, so that the prompts depend only on the generation's number and the rewards, never on timing.

With over-sampling, more groups are open than a generation needs. The first complete groups form a
generation; open groups continue into the next, until they are too old. Each rejected group is
replaced at once.

The queue only counts: without engines, threads or clocks, a test can drive it through any order of
events.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class GroupKey(NamedTuple):
    """Name of a group; keys sort in the order in which groups are opened."""

    generation: int
    round: int
    """0: the generation's own prompts; 1, 2, ...: replacements."""
    position: int


@dataclass
class GroupQueue:
    """Groups by key: open, complete, or to be opened.

    `now` is the number of the generation that training with the engines' weights begins. A group
    opened at generation g may be trained on in generations g to g + `max_staleness`.
    """

    size: int
    """Groups in a generation; no two of them have the same prompt."""
    max_staleness: int
    row_of: Callable[[GroupKey], int]
    """Data row of a group's prompt."""
    num_wanted: int | None = None
    """Least number of open or complete groups with over-sampling, `over_sampling` * `size`; None:
    in order."""
    most_rounds: int = 0
    """Limit of a generation's rounds; with over-sampling, it replaces `most_rounds` * `size` groups
    at most."""
    widening: float = 1.0
    """Groups that a round opens for each missing group."""
    next_number: int = 0
    """Position in the stream of the first group that was never opened."""
    reopened: list[GroupKey] = field(default_factory=list)
    """Groups to open before new ones: dropped as too old, or open when the run was saved."""

    def __post_init__(self) -> None:
        self.opened_at: dict[GroupKey, int] = {}
        """Generation at which each open or complete group was opened."""
        self.rounds: dict[int, int] = defaultdict(int)
        """Number of rounds of each generation; in order only."""
        self._complete: set[GroupKey] = set()
        self._rejected: dict[int, list[GroupKey]] = defaultdict(list)
        """Rejected groups by generation (in order) fill it up if the rounds find too few others."""

    def key_of(self, number: int) -> GroupKey:
        """Group of round 0 at position `number` of the stream of prompts."""
        generation, position = divmod(number, self.size)
        return GroupKey(generation, 0, position)

    def number_of(self, key: GroupKey) -> int:
        assert key.round == 0, "replacements have no place in the stream"
        return key.generation * self.size + key.position

    @property
    def untaken(self) -> list[GroupKey]:
        """Groups, opened or in `reopened`, that no generation has taken."""
        return sorted([*self.opened_at, *self.reopened])

    def open_generation(self, generation: int, now: int) -> list[GroupKey]:
        """Open round 0 of a generation; in order only."""
        self.next_number = max(self.next_number, (generation + 1) * self.size)
        new = [GroupKey(generation, 0, position) for position in range(self.size)]
        self.opened_at |= dict.fromkeys(new, now)
        return new

    def num_missing(self, generation: int) -> int:
        """Number of groups that the next round opens; 0 while groups are open, and for a complete
        generation. In order only."""
        is_open, complete = self._groups_of(generation)
        missing = self.size - len(complete)
        if is_open or missing <= 0 or self.rounds[generation] >= self.most_rounds:
            return 0
        return math.ceil(missing * self.widening)

    def open_round(self, generation: int, count: int, now: int) -> list[GroupKey]:
        """Open `count` groups of the next round; 0: there are no other prompts to try."""
        # Without other prompts, `most_rounds` ends the rounds: `num_missing` is 0 from now on.
        number = self.rounds[generation] + 1 if count else self.most_rounds
        self.rounds[generation] = number
        new = [GroupKey(generation, number, position) for position in range(count)]
        self.opened_at |= dict.fromkeys(new, now)
        return new

    def open_new(self, now: int, limit: int) -> list[GroupKey]:
        """Open groups until `num_wanted`, at most `limit`, are open or complete; with over-sampling
        only. `limit`, a multiple of `size`, is the number of groups that training still needs."""
        assert self.num_wanted is not None
        new = []
        # Beyond `num_wanted` where prompts repeat, since a generation needs `size` distinct rows.
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
        """Open groups of a checkpoint that have samples; they keep their age."""
        self.reopened = [key for key in self.reopened if key not in opened_at]
        self.opened_at |= opened_at

    def complete(self, key: GroupKey) -> None:
        assert key in self.opened_at, "it is open"
        self._complete.add(key)

    def reject(self, key: GroupKey) -> bool:
        """Reject an open group and return True, or at the limit of replacements complete it and
        return False."""
        # -1: with over-sampling, groups belong to no generation until one takes them.
        generation = key.generation if self.num_wanted is None else -1
        if self.num_wanted and len(self._rejected[generation]) >= self.most_rounds * self.size:
            self.complete(key)
            return False
        del self.opened_at[key]
        self._rejected[generation].append(key)
        return True

    def next_generation(self, generation: int) -> list[GroupKey] | None:
        """Groups that would form a generation; None while there are too few. With over-sampling,
        it is the next generation to be taken."""
        if self.num_wanted is None:
            is_open, complete = self._groups_of(generation)
            if is_open or self.num_missing(generation):
                return None
            found = [*complete, *sorted(self._rejected[generation])]
        else:  # oldest first: these groups would be dropped next as too old
            found = sorted(self._complete, key=lambda each: (self.opened_at[each], each))
        taken: dict[int, GroupKey] = {}
        for key in found:
            taken.setdefault(self.row_of(key), key)
        keys = [*taken.values()][: self.size]
        if len(keys) < self.size:
            return None
        return keys if self.num_wanted is None else sorted(keys)

    def pop_generation(self, generation: int) -> tuple[list[GroupKey], list[GroupKey]]:
        """Remove the groups of the `next_generation`; returns them, and the rejected or spare
        groups that it leaves over."""
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
        """Remove a generation that will be made again from other weights; returns its groups."""
        dropped = [key for key in self.opened_at if key.generation == generation]
        dropped += self._rejected.pop(generation, [])
        self.rounds.pop(generation, None)
        for key in dropped:
            self.opened_at.pop(key, None)  # `reject` has removed rejected groups
            self._complete.discard(key)
        return dropped

    def drop_stale(self, now: int) -> list[GroupKey]:
        """Drop groups that are too old for generation `now`, to open them again; returns them."""
        dropped = sorted(
            key for key, then in self.opened_at.items() if then < now - self.max_staleness
        )
        for key in dropped:
            del self.opened_at[key]
            self._complete.discard(key)
        self.reopened = sorted([*self.reopened, *dropped])
        return dropped

    def _groups_of(self, generation: int) -> tuple[bool, list[GroupKey]]:
        """Whether a generation has open groups, and its complete groups in order."""
        own = [key for key in self.opened_at if key.generation == generation]
        complete = [key for key in own if key in self._complete]
        return len(complete) < len(own), sorted(complete)
