"""The progress bar that is shown while a large checkpoint is verified."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_SECONDS = 5.0


class VerifyBar:
    """A progress bar on stderr, if that is a terminal; appears after PATIENCE_SECONDS."""

    def __init__(self, text: str, num_bytes: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task(text, total=num_bytes)
        self._appears = time.monotonic() + PATIENCE_SECONDS
        self.is_shown = False

    def advance(self, num_bytes: int) -> None:
        """Report that `num_bytes` more are verified."""
        self._progress.advance(self._task, num_bytes)
        if not self.is_shown and self._console.is_terminal and time.monotonic() > self._appears:
            self.is_shown = True
            self._progress.start()

    def __enter__(self) -> "VerifyBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_shown:
            self._progress.stop()
