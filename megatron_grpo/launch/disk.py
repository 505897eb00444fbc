"""Files of a run directory, written so that a full disk leaves no half of a picture or record."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_grpo.launch.run_dir import resume_text

OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a kill or with a full disk, it stays as it was."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    whole = path.with_name(f"{path.name}.tmp")
    with _named(path):
        try:
            with whole.open("wb") as file:
                file.write(data)
                file.flush()
                # Else a host's crash could leave the new name without the content.
                os.fsync(file.fileno())
            whole.replace(path)
        except OSError:
            whole.unlink(missing_ok=True)
            raise


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file; raises OSError that names it, and leaves nothing to write later."""
    with _named(path), path.open("ab") as file:
        for line in lines:
            file.write(line.encode() + b"\n")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name `path` in the OSError of a write, which knows no more than a descriptor."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def resumable(run_dir: Path) -> Iterator[None]:
    """Make one line of an OSError in a step: the file, and the step that a run resumes from."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        if error.errno not in (None, *OF_DISKS) and not error.filename:
            raise  # only the traceback says what it is about
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise OSError(f"{message}; {resume_text(run_dir)}") from error
