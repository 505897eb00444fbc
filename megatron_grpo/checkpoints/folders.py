"""The folders of a run's checkpoints: `step_N` after N optimizer steps, the pointer `LATEST`, and
the link `best`.

A checkpoint is written under a temporary name and renamed once all of it is on disk. Does not
import torch, as a config is validated before anything starts.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from checkpoint_convert.new_folder import sync, sync_tree
from megatron_grpo.config.train import Hook
from megatron_grpo.launch.run_dir import POINTER

PARTIAL = ".partial"
REPLACED = ".replaced"
STATE_FILE = "trainer.json"
BEST = "best"
"""Symbolic link to the checkpoint with the highest value of `train.keep_best`."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def candidates(folder: Path) -> list[int]:
    """Steps of the checkpoints to try, best first: the one in `LATEST`, then earlier ones. Later
    ones hold discarded work. If `LATEST` names no existing checkpoint, all steps, newest first.
    Raises ValueError if there is a `LATEST` but no checkpoint."""
    steps = sorted(_steps(folder), reverse=True)
    pointer = folder / POINTER
    latest = _named_in(pointer)
    if pointer.exists() and not steps:
        raise ValueError(
            f"{pointer} says that there were checkpoints, but {folder} has none: put them back, or "
            f"remove {POINTER} to start over"
        )
    return [step for step in steps if step <= latest] if latest in steps else steps


def latest_step(folder: Path) -> int:
    """Step of the checkpoint to try first, 0 if there is none; ValueError like `candidates`."""
    return next(iter(candidates(folder)), 0)


def how_ended(folder: Path, num_steps: int, hooks: Collection[Hook]) -> str:
    """Say how the run came to its end, and what continues it; empty if it has not. One that a hook
    has ended goes on with other `hooks`."""
    step = latest_step(folder)
    if step >= num_steps:
        return f"{step} of {num_steps} steps (train.num_steps above {step} continues it)"
    try:
        state = json.loads((step_folder(folder, step) / STATE_FILE).read_text(encoding="utf-8"))
        stopped_by = state["state"].get("stopped_by")
    except (OSError, ValueError, KeyError):  # none, or damaged: the load will say so
        return ""
    if stopped_by not in [hook.model_dump() for hook in hooks]:
        return ""
    name = stopped_by["name"]
    return f"{name} stopped it after step {step} of {num_steps} (other train.hooks continue it)"


def best_step(folder: Path) -> int:
    """Step of the checkpoint `best`; 0 without one."""
    return _step_of((folder / BEST).resolve().name)


def checkpoint_at(path: Path) -> Path:
    """Find the checkpoint that `train.init_from` names: the newest of a run directory, or `path`
    itself. Raises ValueError if there is none."""
    if _step_of((named := path.resolve()).name) and named.is_dir():  # `best` is a link
        return named
    checkpoints = path / "checkpoints"
    if (step := latest_step(checkpoints)) == 0:
        raise ValueError(
            f"train.init_from {path} has no checkpoint: give the run_dir of a run that has saved "
            "one, or its checkpoints/step_N"
        )
    return step_folder(checkpoints, step)


def instead_of(checkpoint: Path) -> str:
    """Advice if `train.init_from` cannot use `checkpoint`: the newest other one of its run."""
    others = _steps(checkpoint.parent) - {step_in(checkpoint)}
    other = (
        f"another checkpoint, such as {step_folder(checkpoint.parent, max(others))}"
        if others
        else "another run's checkpoint, as this is the only one of its run"
    )
    return f"set train.init_from to {other}, or leave it out to start from model.path"


def step_in(checkpoint: Path) -> int:
    return _step_of(checkpoint.name)


def remove_leftovers(folder: Path) -> None:
    """Finish publications that were interrupted after the rename; remove other leftovers. A
    leftover that cannot be removed keeps a name that is ignored."""
    pointer = folder / (POINTER + PARTIAL)
    if step_folder(folder, _named_in(pointer)).is_dir():
        os.replace(pointer, folder / POINTER)
    else:  # before the loop below, which may give a replaced folder the name in the pointer
        pointer.unlink(missing_ok=True)
    for replaced in folder.glob(f"step_*{REPLACED}"):
        original = replaced.with_name(replaced.name.removesuffix(REPLACED))
        remove(replaced) if original.exists() else replaced.rename(original)
    for unfinished in folder.glob(f"*{PARTIAL}"):
        if unfinished.is_symlink():
            unfinished.unlink()
        shutil.rmtree(unfinished, ignore_errors=True)


def publish(
    partial: Path,
    step: int,
    keep: int,
    is_kept: Callable[[int], bool] = lambda _: False,
    values: Mapping[int, float] = MappingProxyType({}),
) -> None:
    """Make the complete folder `partial` the newest checkpoint; drop old ones.

    The `keep` newest stay, the steps of which `is_kept` is true, and the first with the highest of
    `values`, which the link `best` names. An interruption at any point leaves a complete
    checkpoint. Once the new one has its final name, it counts as the newest, because
    `remove_leftovers` then updates `LATEST`.
    """
    folder = partial.parent
    final = step_folder(folder, step)
    sync_tree(partial)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():  # from work that was discarded when the run went back
        final.rename(replaced)
    pointer = folder / (POINTER + PARTIAL)  # only now: it must not refer to the replaced folder
    pointer.write_text(final.name + "\n", encoding="utf-8")
    # Each `sync` puts one step on disk before the next: after a power failure, the steps done are
    # a prefix of these lines, which `remove_leftovers` finishes or undoes.
    sync(pointer)
    sync(folder)
    partial.rename(final)
    sync(folder)
    os.replace(pointer, folder / POINTER)
    sync(folder)
    if replaced.exists():
        remove(replaced)
    steps = sorted(_steps(folder))
    own = [other for other in steps if other <= step]
    best = max((other for other in own if other in values), key=values.__getitem__, default=0)
    _name_best(folder, best)
    # Later ones, too: the run went back and discarded them.
    for other in {*steps} - {*own[-keep:], *filter(is_kept, own), best}:
        remove(step_folder(folder, other))


def _name_best(folder: Path, step: int) -> None:
    """Let `best` name the checkpoint of `step`, or with 0 nothing."""
    link, new = folder / BEST, folder / (BEST + PARTIAL)
    if link.is_dir() and not link.is_symlink():  # the run was copied by a tool that follows links
        remove(link)
    if step == 0:
        link.unlink(missing_ok=True)
    elif best_step(folder) != step:
        new.symlink_to(step_folder(folder, step).name)
        os.replace(new, link)
        sync(folder)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, complete or not. It is renamed first, so an interrupted removal frees
    the name. The next start tries again, for example if open NFS files prevented it."""
    # A plain rename needs no new file: removing must also work at the limit of a file quota.
    name = f"{checkpoint.name}.{secrets.token_hex(4)}{PARTIAL}"
    leftover = checkpoint.rename(checkpoint.with_name(name))
    shutil.rmtree(leftover, ignore_errors=True)


def _steps(folder: Path) -> set[int]:
    """Steps of the existing checkpoints, including checkpoints about to be replaced."""
    if not folder.exists():
        return set()
    # Not with glob, which hides errors of the file system.
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return {_step_of(name.removesuffix(REPLACED)) for name in names} - {0}


def _named_in(pointer: Path) -> int:
    """Step that a pointer names; 0 for none."""
    return (
        _step_of(pointer.read_text(errors="replace", encoding="utf-8").strip())
        if pointer.exists()
        else 0
    )


def _step_of(name: str) -> int:
    """Step in a checkpoint's name; 0 for another name."""
    return int(name.removeprefix("step_")) if re.fullmatch(r"step_[1-9]\d*", name) else 0
