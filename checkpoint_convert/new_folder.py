"""Folders that get their final name only when they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_convert.formats import errors_named


@contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to write `num_bytes` into; renamed to `out` on success and removed on failure.

    Only a process that is killed leaves it behind, as ``OUT.partial``. Raises ValueError when `out`
    or such a leftover exists, or the disk is too full.
    """
    out = out.absolute()
    partial = out.with_name(out.name + ".partial")
    # `exists` is false for a broken link, which is in the way as well.
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: remove it, or choose another --out")
    if os.path.lexists(partial):
        raise ValueError(
            f"{partial} exists: another run is writing it, or a run that was killed left it; in "
            "that case remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, num_bytes)
    partial.mkdir()
    try:
        with errors_named(partial):
            yield partial
        sync_tree(partial)
        partial.rename(out)
        sync(out.parent)
    # Not `Exception`: signals raise `_Stopped` in the CLI, or KeyboardInterrupt.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ValueError when the disk of `folder` has less than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(f"{folder} has {free:,} bytes free, but the weights take {num_bytes:,}")


def sync_tree(folder: Path) -> None:
    """Flush all files below `folder`, and their names, to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with errors_named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
