"""One run at a time in a run directory."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; raises ValueError when another process does.

    The kernel lets go of it when the process ends, however it ends.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process trains in {run_dir}: wait for its end, or set train.run_dir"
            ) from None
        yield
