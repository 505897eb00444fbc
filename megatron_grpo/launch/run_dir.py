"""The run directory, locked by one run at a time; and the token shared by the job's processes.

Trainers and engines receive the token in their environment: unlike a command line or a file, other
users cannot read it. Imports almost nothing, because every command imports this file.
"""

import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.launch.process import is_user_error

MOUNTS = Path("/proc/mounts")
OCTAL = re.compile(r"\\([0-7]{3})")
LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of Lustre and NFS with which other hosts do not see a lock."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    kind: str
    """Type of the file system: ext4, lustre, nfs4 ..."""
    options: frozenset[str]

    @classmethod
    def holding(cls, folder: Path, mounts: str | None = None) -> "Mount":
        """The mount that holds `folder`, an absolute path without symbolic links."""
        lines = (mounts or MOUNTS.read_text(encoding="utf-8")).splitlines()
        # The kernel writes spaces and backslashes in octal: \040.
        rows = [
            [OCTAL.sub(lambda match: chr(int(match[1], 8)), field) for field in line.split()[1:4]]
            for line in lines
        ]
        holding = [row for row in rows if folder.is_relative_to(row[0])]
        if not holding:  # inside a chroot
            return cls("unknown", frozenset())
        # If several are mounted over each other, the last one is visible.
        _, kind, options = max(reversed(holding), key=lambda row: len(row[0]))
        return cls(kind, frozenset(options.split(",")))

    @property
    def local_locks(self) -> str:
        """The option that limits locks to one host; empty if other hosts see them."""
        return min(self.options & LOCAL_LOCKS, default="")


POINTER = "LATEST"
"""File in `checkpoints` with the name of the newest checkpoint, such as step_20."""


def interrupted_text(run_dir: Path) -> str:
    """The last line of an interrupted run: where the same command resumes it."""
    return f"interrupted: {resume_text(run_dir)}"


def resume_text(run_dir: Path) -> str:
    """Say from which step the same command resumes: the newest checkpoint's."""
    pointer = run_dir / "checkpoints" / POINTER
    if not pointer.is_file():
        return "run the same command to begin from the start"
    step = pointer.read_text(encoding="utf-8").strip().removeprefix("step_")
    return f"run the same command to resume from step {step}"


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system mounted without locks: the first is Lustre's, the second NFS's."""
REMEDY = (
    "mount its file system with -o flock (Lustre), or without nolock and local_lock and with "
    "rpc.statd (NFS), or set train.run_dir"
)


def make_folder(folder: Path) -> None:
    """Make the run directory or a folder in it; ValueError, naming the key, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not is_user_error(error):
            raise
        raise ValueError(
            f"train.run_dir: the folder {folder} cannot be made ({error.strerror}): set another"
        ) from None


def check_run_dir(run_dir: Path, *, starts_here: bool) -> None:
    """Raise ValueError if the run directory and its logs cannot be made.

    `starts_here`: also raise if another process trains there. Otherwise remove the made folders.
    """
    if starts_here and (run_dir / "lock").exists():
        with run_lock(run_dir):
            pass
    folder = run_dir / "logs"
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    make_folder(folder)
    if not starts_here:
        with suppress(OSError):  # another process has put something there, or removed it
            for path in missing:
                path.rmdir()


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run directory until this process ends, in whatever way. ValueError if another
    process holds the lock, or the file system has none."""
    make_folder(run_dir)
    if option := Mount.holding(run_dir.resolve()).local_locks:
        raise ValueError(
            f"{run_dir} cannot be locked: other hosts do not see locks with {option}; {REMEDY}"
        )
    with (run_dir / "lock").open("a+", encoding="utf-8") as file:
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
        job = os.environ.get("SLURM_JOB_ID")
        of_job = f", Slurm job {job}" if job else ""
        # For the message that other processes show.
        file.write(f"pid {os.getpid()} on {socket.gethostname()}{of_job}\n")
        file.flush()
        yield


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a kill or with a full disk, it stays as it was."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    whole = path.with_name(f"{path.name}.tmp")
    try:
        with whole.open("wb") as file:
            file.write(data)
            file.flush()
            # Else a host's crash could leave the new name without the content.
            os.fsync(file.fileno())
        whole.replace(path)
    except OSError as error:  # an error of a write names only a descriptor: add the path
        whole.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def resumable(run_dir: Path) -> Iterator[None]:
    """Shorten an OSError in a step to one line: the file, and the step to resume from."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        if error.errno not in (None, *DISK_ERRORS) and not error.filename:
            raise  # only the traceback says what it is about
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise OSError(f"{message}; {resume_text(run_dir)}") from error


TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"
"""Holds the token for engines given by address, by which ranks also know each other; engines that a
run starts get a fresh one."""

MIN_TOKEN_LENGTH = 16

MAKE_ONE = f"make one with `export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`"


def new_token() -> str:
    return secrets.token_hex(32)


def take_token(environ: MutableMapping[str, str]) -> str | None:
    """The user's token, removed from `environ` so that no child process inherits it."""
    return environ.pop(TOKEN_VARIABLE, None)


def check_token(token: str | None) -> str:
    """Return `token`, or raise ValueError (without showing it) if it is missing or too weak."""
    if not token:
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set: the hosts of a run, and engines given by address, share "
            f"a token; {MAKE_ONE} and use the same for all"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, at least {MIN_TOKEN_LENGTH} are "
            f"needed: {MAKE_ONE}"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError(
            f"{TOKEN_VARIABLE} has spaces or other characters that an HTTP header cannot carry: "
            f"{MAKE_ONE}"
        )
    return token


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
