"""Rows of the data that no prompt can be made of: all are counted, the first are shown."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

NUM_SHOWN = 20


@dataclass(frozen=True)
class Fault:
    """Why a row cannot be used: of which kind it is, and what is special about this one."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class InvalidRows:
    """What is wrong with a data set."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._first: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self.kinds.total()

    def add(self, index: int, place: str, fault: Fault) -> None:
        """Row `index` of the data, which is at `place`, has this fault."""
        self.kinds[fault.kind] += 1
        insort(self._first, (index, f"{place}: {fault}"))
        del self._first[NUM_SHOWN:]

    @property
    def summary(self) -> str:
        """How many of which kind."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())

    @property
    def listing(self) -> str:
        """A line for each of the first, by their order in the data, and one for the rest."""
        lines = [text for _, text in self._first]
        if len(self) > NUM_SHOWN:
            lines.append(f"and {len(self) - NUM_SHOWN} more")
        return "".join(f"\n  {line}" for line in lines)
