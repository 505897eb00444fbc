"""A lock that allows one run at a time in a run directory."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_grpo.launch.mount import Mount

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system mounted without locks: the first is Lustre's, the second NFS's."""
REMEDY = (
    "mount its file system with -o flock (Lustre), or without nolock and local_lock and with "
    "rpc.statd (NFS), or set train.run_dir"
)


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run directory; raises ValueError if another process holds it or it has no locks.

    The kernel releases the lock when the process ends, however it ends.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if option := Mount.of(run_dir.resolve()).local_locks:
        raise ValueError(
            f"{run_dir} cannot be locked: other hosts do not see locks with {option}; {REMEDY}"
        )
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another process trains in {run_dir} ({file.read().strip()}): wait for its end, "
                "or set train.run_dir"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise ValueError(f"{file.name} cannot be locked ({error.strerror}): {REMEDY}") from None
        file.truncate(0)
        file.write(_holder())
        file.flush()
        yield


def _holder() -> str:
    """This process's identity, for the message that other processes show."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"pid {os.getpid()} on {socket.gethostname()}{f', Slurm job {job}' if job else ''}\n"
