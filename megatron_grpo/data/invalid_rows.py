"""Rows of the data that cannot become prompts: all are counted, and the first ones shown."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

NUM_SHOWN = 20


@dataclass(frozen=True)
class Fault:
    """Why a row cannot be used: the kind of fault, and the details of this row."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class InvalidRows:
    """The unusable rows of a data set."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._first: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self.kinds.total()

    def add(self, index: int, place: str, fault: Fault) -> None:
        """Record a fault of row `index` of the data, which is at `place`."""
        self.kinds[fault.kind] += 1
        insort(self._first, (index, f"{place}: {fault}"))
        del self._first[NUM_SHOWN:]

    @property
    def summary(self) -> str:
        """Number of rows by kind of fault."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())

    @property
    def listing(self) -> str:
        """A line for each of the first rows, in the order of the data, and one for the rest."""
        lines = [text for _, text in self._first]
        if len(self) > NUM_SHOWN:
            lines.append(f"and {len(self) - NUM_SHOWN} more")
        return "".join(f"\n  {line}" for line in lines)
