"""Progress bars for slow work; without a terminal, a line from time to time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Column
from rich.text import Text

PATIENCE_SECONDS = 5.0
"""Shorter waits show nothing."""

LINE_SECONDS = 30.0
"""Interval between the lines about a wait without a bar."""


Show = Callable[[int, int], None]
"""Called from time to time with (amount done, total amount)."""


class _PhaseColumn(ProgressColumn):
    """Text of a task, and the seconds since its field `since` (`time.monotonic()`), if any."""

    def render(self, task: Task) -> Text:
        since = task.fields.get("since")
        seconds = "" if since is None else f" {time.monotonic() - since:.0f} s"
        return Text(f"{task.description}{seconds}", style="dim")


def progress_bar(
    console: Console, amount: ProgressColumn | None = None, *, transient: bool = False
) -> Progress:
    """A bar per task with its `amount` (default: a count); disabled without a terminal. A
    `transient` bar disappears when it stops."""
    return Progress(
        amount or MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        _PhaseColumn(table_column=Column(ratio=1, no_wrap=True)),
        console=console,
        disable=not console.is_terminal,
        transient=transient,
        expand=True,
    )


def tracked[T](items: Sequence[T], what: str) -> Iterable[T]:
    """Iterate over `items` with a bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


class Wait:
    """Progress of a wait: a task in `bar`, or occasional lines if the bar is disabled. Counts
    `unit`, such as prompts; None: bytes."""

    def __init__(self, bar: Progress, what: str, unit: str | None) -> None:
        self._bar, self._what, self._unit = bar, what, unit
        self._task: TaskID | None = None
        self._last_line = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Show the amount done. The last call, if it comes, has `done == total`."""
        now = time.monotonic()
        if self._task is None:
            self._task = self._bar.add_task(self._what, total=total)
        self._bar.update(self._task, completed=done)
        if self._bar.disable and done < total and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            amount = f"{done} of {total} {self._unit}"
            if self._unit is None:
                amount = f"{decimal(done)} of {decimal(total)}"
            line = f"{self._what}: {amount}"
            self._bar.console.print(line, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)


@contextmanager
def waiting(
    what: str, unit: str | None = None, *, shows: bool = True, console: Console | None = None
) -> Iterator[Show]:
    """Show the progress of a wait on stdout, once it has taken PATIENCE_SECONDS.

    Yields the function to report progress with; `unit` as in `Wait`. Of several processes that wait
    together, only one should have `shows`.
    """
    if not shows:
        yield lambda done, total: None
        return
    amount = DownloadColumn() if unit is None else None
    bar = progress_bar(console or Console(), amount, transient=True)
    wait, began = Wait(bar, what, unit), time.monotonic()

    def show(done: int, total: int) -> None:
        wait.show(done, total)
        if not bar.live.is_started and time.monotonic() - began > PATIENCE_SECONDS:
            bar.start()  # nothing, if it is disabled

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
