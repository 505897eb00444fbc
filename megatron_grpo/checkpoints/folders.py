"""The folders of a run's checkpoints: `step_N` after N optimizer steps, and `LATEST`.

A checkpoint is written under a temporary name and appears under its own when all of it is on the
disk. No torch here: a config is judged before anything starts.
"""

import os
import re
import shutil
from pathlib import Path

POINTER = "LATEST"
PARTIAL = ".partial"
REPLACED = ".replaced"


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint after `step` optimizer steps."""
    return folder / f"step_{step}"


def candidates(folder: Path) -> list[int]:
    """Steps of the checkpoints to try, the best first: that of `LATEST`, then earlier ones.

    Where `LATEST` names none that is there, all of them. Those after it are of work that the run
    has gone back behind. Raises ValueError when there is a `LATEST` and nothing that it could mean.
    """
    steps = sorted(_steps(folder), reverse=True)
    pointer = folder / POINTER
    latest = _named_in(pointer)
    if pointer.exists() and not steps:
        raise ValueError(
            f"{pointer} says that there were checkpoints, and {folder} has none: put them back, or "
            f"remove {POINTER} to begin anew"
        )
    return [step for step in steps if step <= latest] if latest in steps else steps


def latest_step(folder: Path) -> int:
    """Optimizer steps of the checkpoint to be tried first; 0 when there is none.

    Raises ValueError like `candidates`.
    """
    return next(iter(candidates(folder)), 0)


def remove_leftovers(folder: Path) -> None:
    """Finish what was interrupted when it could no longer fail; remove what is left of the rest."""
    pointer = folder / (POINTER + PARTIAL)
    if step_folder(folder, _named_in(pointer)).is_dir():
        os.replace(pointer, folder / POINTER)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        original = replaced.with_name(replaced.name.removesuffix(REPLACED))
        shutil.rmtree(replaced) if original.exists() else replaced.rename(original)
    for partial in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def publish(partial: Path, step: int, keep: int) -> None:
    """Have the complete `partial` be the newest checkpoint, and drop all but `keep`.

    Whenever this is interrupted, a complete checkpoint is there; once this one has its name, it is
    the newest, as `remove_leftovers` moves `LATEST` then.
    """
    folder = partial.parent
    final = step_folder(folder, step)
    sync_tree(partial)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():  # of work that the run has gone back behind
        final.rename(replaced)
    pointer = folder / (POINTER + PARTIAL)  # only now: with its folder it means the new one
    pointer.write_text(final.name + "\n")
    sync(pointer)
    sync(folder)
    partial.rename(final)
    sync(folder)
    os.replace(pointer, folder / POINTER)
    sync(folder)
    if replaced.exists():
        _drop(replaced)
    _drop_others(folder, step, keep)


def sync_tree(folder: Path) -> None:
    """See all files below `folder`, and their names, on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """See a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_others(folder: Path, step: int, keep: int) -> None:
    """Drop old checkpoints, and later ones: of a branch that was left when the run went back."""
    steps = sorted(_steps(folder))
    kept = [other for other in steps if other <= step][-keep:]
    for other in steps:
        if other not in kept:
            _drop(step_folder(folder, other))


def _drop(checkpoint: Path) -> None:
    """Remove a checkpoint; half removed it is none.

    Where somebody still reads it, network file systems keep files of it: the next start tries
    again.
    """
    leftover = checkpoint.with_name(checkpoint.name + PARTIAL)
    checkpoint.rename(leftover)
    shutil.rmtree(leftover, ignore_errors=True)


def _steps(folder: Path) -> set[int]:
    """Steps of the checkpoints that are there, and of those that were about to be replaced."""
    found = {_step_of(path.name.removesuffix(REPLACED)) for path in folder.glob("step_*/")}
    return found - {0}


def _named_in(pointer: Path) -> int:
    """The step that a pointer names; 0 for none."""
    return _step_of(pointer.read_text(errors="replace").strip()) if pointer.exists() else 0


def _step_of(name: str) -> int:
    """The step in a checkpoint's name; 0 for another name."""
    return int(name.removeprefix("step_")) if re.fullmatch(r"step_[1-9]\d*", name) else 0
