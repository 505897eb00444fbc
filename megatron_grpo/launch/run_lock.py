"""One run at a time in a run directory."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Of a file system that is mounted without them: the first is Lustre's, the second NFS's."""


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; raises ValueError when another process does, or nobody can.

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
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise ValueError(
                f"{file.name} cannot be locked ({error.strerror}): mount its file system with "
                "-o flock (Lustre), start rpc.statd (NFS), or set train.run_dir"
            ) from None
        yield
