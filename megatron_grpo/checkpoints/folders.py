"""The folders of a run's checkpoints: `step_N` after N optimizer steps, and `LATEST`.

A checkpoint is written under a temporary name and appears under its own when all of it is on the
disk. No torch here: a config is judged before anything starts.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from checkpoint_convert.new_folder import sync, sync_tree

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
    """Finish what was interrupted when it could no longer fail; remove what is left of the rest.

    What cannot be removed stays under a name that means nothing.
    """
    pointer = folder / (POINTER + PARTIAL)
    if step_folder(folder, _named_in(pointer)).is_dir():
        os.replace(pointer, folder / POINTER)
    else:  # at once: below, an old folder may get the name that is in it
        pointer.unlink(missing_ok=True)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        original = replaced.with_name(replaced.name.removesuffix(REPLACED))
        remove(replaced) if original.exists() else replaced.rename(original)
    for partial in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)


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
        remove(replaced)
    _drop_others(folder, step, keep)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, complete or not; half removed it is none, and its name is free.

    Where somebody still reads it, network file systems keep files of it: the next start tries
    again.
    """
    name = tempfile.mkdtemp(PARTIAL, f"{checkpoint.name}.", checkpoint.parent)
    leftover = checkpoint.rename(name)  # in place of the empty folder
    shutil.rmtree(leftover, ignore_errors=True)


def _drop_others(folder: Path, step: int, keep: int) -> None:
    """Drop old checkpoints, and later ones: of a branch that was left when the run went back."""
    steps = sorted(_steps(folder))
    kept = [other for other in steps if other <= step][-keep:]
    for other in steps:
        if other not in kept:
            remove(step_folder(folder, other))


def _steps(folder: Path) -> set[int]:
    """Steps of the checkpoints that are there, and of those that were about to be replaced."""
    if not folder.exists():
        return set()
    # Not by glob, which leaves out what the file system cannot tell of.
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return {_step_of(name.removesuffix(REPLACED)) for name in names} - {0}


def _named_in(pointer: Path) -> int:
    """The step that a pointer names; 0 for none."""
    return _step_of(pointer.read_text(errors="replace").strip()) if pointer.exists() else 0


def _step_of(name: str) -> int:
    """The step in a checkpoint's name; 0 for another name."""
    return int(name.removeprefix("step_")) if re.fullmatch(r"step_[1-9]\d*", name) else 0
