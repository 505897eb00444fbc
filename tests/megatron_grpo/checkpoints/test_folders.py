"""The checkpoint in use, whatever a killed process has left in the folder."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_grpo.checkpoints.folders import (
    candidates,
    checkpoint_at,
    how_ended,
    latest_step,
    publish,
    remove,
    remove_leftovers,
    step_folder,
    step_in,
)
from megatron_grpo.config.train import Hook


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "made_as").write_text(name)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("pointer", "tried"),
    [
        ("step_100\n", [100, 10, 5]),
        ("step_10\n", [10, 5]),  # the run was sent back
        *((bad, [100, 10, 5]) for bad in (None, "", "step_7\n", "../step_5\n", "\0\xff")),
    ],
)
def test_the_checkpoint_of_the_pointer_is_tried_first_then_earlier_ones(tmp_path, pointer, tried):
    assert latest_step(tmp_path / "not_there") == 0
    make(tmp_path, "step_5", "step_10", "step_100", "step_7.partial", "step_9.bak", "step_0")
    if pointer is not None:
        (tmp_path / "LATEST").write_text(pointer)
    assert candidates(tmp_path) == tried
    assert latest_step(tmp_path) == tried[0]


HUNDREDS = (100, 200, 300, 400).__contains__


@pytest.mark.parametrize(
    ("there", "step", "options", "kept"),
    [
        ([5, 10], 20, {"keep": 2}, [10, 20]),
        ([2, 20, 30], 5, {"keep": 2}, [2, 5]),  # the run went back
        ([100, 150, 200, 290, 400], 300, {"keep": 2, "is_kept": HUNDREDS}, [100, 200, 290, 300]),
        ([5], 5, {"keep": 1}, [5]),
    ],
)
def test_a_complete_folder_becomes_the_newest_and_the_oldest_go(
    tmp_path, there, step, options, kept
):
    make(tmp_path, *(f"step_{each}" for each in there), f"step_{step}.partial")
    publish(tmp_path / f"step_{step}.partial", step, **options)
    assert names(tmp_path) == {*(f"step_{each}" for each in kept), "LATEST"}
    assert (tmp_path / f"step_{step}" / "made_as").read_text() == f"step_{step}.partial"
    assert candidates(tmp_path)[0] == step


@pytest.mark.parametrize(
    ("there", "step", "values", "kept", "best"),
    [
        ([10, 20], 30, {0: 0.9, 10: 0.5, 20: 0.2, 30: 0.1}, [10, 30], "step_10"),
        ([10, 20], 30, {10: 0.5, 20: 0.2, 30: 0.6}, [30], "step_30"),
        ([10, 20], 30, {10: 0.5, 20: 0.5}, [10, 30], "step_10"),  # the first of equal ones
        ([10, 20], 30, {5: 0.9, 20: 0.1}, [20, 30], "step_20"),  # of those that are still there
        ([10, 20, 40], 30, {10: 0.5, 40: 0.9}, [10, 30], "step_10"),  # the run went back
        ([10, 20], 30, {}, [30], None),
    ],
)
@pytest.mark.parametrize("before", ["a link", "a copy"])
def test_the_best_checkpoint_stays_and_has_a_name(
    tmp_path, there, step, values, kept, best, before
):
    make(tmp_path, *(f"step_{each}" for each in there), f"step_{step}.partial")
    if before == "a link":
        (tmp_path / "best").symlink_to("step_20")
    else:  # the run was copied by a tool that follows links
        make(tmp_path, "best")
    publish(tmp_path / f"step_{step}.partial", step, keep=1, values=values)
    assert names(tmp_path) == {*(f"step_{n}" for n in kept), "LATEST"} | (
        {"best"} if best else set()
    )
    if best:
        assert os.readlink(tmp_path / "best") == best, "relative: the run may move"
        assert checkpoint_at(tmp_path / "best") == tmp_path / best


def test_how_ended_knows_a_hook_that_the_run_still_has(tmp_path):
    make(tmp_path, "step_4")
    state = tmp_path / "step_4" / "trainer.json"
    patience = {"name": "early.py:Patience", "arguments": {"patience": 3}}
    state.write_text(json.dumps({"state": {"stopped_by": patience}}))
    hooks = Hook(**patience), Hook(name="notes.py:Notes")
    assert "early.py:Patience stopped it after step 4 of 9" in how_ended(tmp_path, 9, hooks)
    more = Hook(name="early.py:Patience", arguments={"patience": 5})
    assert how_ended(tmp_path, 9, [more]) == how_ended(tmp_path / "new", 9, hooks) == ""
    assert "4 of 4 steps" in how_ended(tmp_path, 4, [more])
    state.write_text(json.dumps({"state": {"step": 4}}))  # of an earlier release
    assert how_ended(tmp_path, 9, hooks) == ""


def test_a_pointer_without_any_checkpoint_does_not_begin_anew(tmp_path):
    (tmp_path / "LATEST").write_text("step_7\n")
    with pytest.raises(ValueError, match="has none: put them back, or remove LATEST"):
        latest_step(tmp_path)


def test_a_checkpoint_that_cannot_be_examined_is_not_skipped(tmp_path):
    make(tmp_path, "step_5")
    (tmp_path / "step_9").symlink_to("step_9")  # to itself
    (tmp_path / "LATEST").write_text("step_9\n")
    with pytest.raises(OSError, match="step_9"):
        latest_step(tmp_path)


def test_files_are_synced_before_their_rename_and_renames_before_deletions(tmp_path, monkeypatch):
    make(tmp_path, "step_5", "step_9.partial")
    make(tmp_path / "step_9.partial", "hf_config")
    calls, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def recorded_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"sync {path.relative_to(tmp_path)}")
        fsync(descriptor)

    def recorded(name, call):
        def before(source, target):
            calls.append(f"{name} {Path(target).name}")
            call(source, target)

        return before

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded("name", rename))
    monkeypatch.setattr(os, "replace", recorded("name", replace))
    publish(tmp_path / "step_9.partial", 9, keep=2)
    assert set(calls[:4]) == {
        "sync step_9.partial/made_as",
        "sync step_9.partial/hf_config/made_as",
        "sync step_9.partial/hf_config",
        "sync step_9.partial",
    }
    assert calls[4:] == [
        "sync LATEST.partial",
        "sync .",
        "name step_9",
        "sync .",
        "name LATEST",
        "sync .",
    ]


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program catches it."""


SYSTEM_CALLS = ("rename", "replace", "fsync", "symlink", "unlink", "rmdir")


def killed_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Die at the `number`-th (from 0) system call that changes a folder, before it takes effect."""
    calls = 0

    def counted(call):
        def before(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            return call(*args, **kwargs)

        return before

    for name in SYSTEM_CALLS:
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("is_again", [False, True], ids=["a new step", "a step saved again"])
@pytest.mark.parametrize("number", range(40))
def test_killed_between_any_two_system_calls_a_complete_checkpoint_is_there(
    tmp_path, number, is_again
):
    make(tmp_path, "step_5", "step_9", "step_20.partial" if not is_again else "step_9.partial")
    partial = tmp_path / ("step_9.partial" if is_again else "step_20.partial")
    step = 9 if is_again else 20
    (tmp_path / "LATEST").write_text("step_5\n" if is_again else "step_9\n")
    (tmp_path / "best").symlink_to("step_5")
    with pytest.MonkeyPatch.context() as patch:
        killed_at(number, patch)
        with suppress(Killed):
            publish(partial, step, keep=1, values={5: 0.1, step: 0.2})
    before = latest_step(tmp_path)  # read before the ranks start
    has_its_name = partial.name in {f.read_text() for f in tmp_path.glob(f"step_{step}/made_as")}
    kill_starts_after(tmp_path)
    remove_leftovers(tmp_path)
    newest = candidates(tmp_path)[0]
    made_as = (step_folder(tmp_path, newest) / "made_as").read_text()
    is_published = made_as == partial.name
    assert is_published == has_its_name, "complete means published"
    best = (tmp_path / "best").resolve(strict=True)  # never a checkpoint that is gone
    assert step_in(best) in (5, step)
    assert is_published or (newest == before and made_as == f"step_{before}")
    assert is_published or number < 40 - 1, "it was not killed"
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.replaced"))


def kill_starts_after(folder: Path) -> None:
    """Assert that copies whose next start is killed, too, reach the same state."""
    whole = folder.parent / f"{folder.name}_whole"
    shutil.copytree(folder, whole, symlinks=True)
    remove_leftovers(whole)
    for number in range(8):
        killed = folder.parent / f"{folder.name}_{number}"
        shutil.copytree(folder, killed, symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            killed_at(number, patch)
            with suppress(Killed):
                remove_leftovers(killed)
        remove_leftovers(killed)
        assert candidates(killed) == candidates(whole), number
        assert names(killed) == names(whole), number


def unlink_of_nfs(name: str, *, dir_fd: int | None = None) -> None:
    """Like NFS, keep an open file under another name, so that its folder is not empty."""
    if dir_fd is None:
        raise FileNotFoundError(2, "No such file or directory")
    if name.startswith(".nfs"):
        raise OSError(16, "Device or resource busy")
    os.rename(name, f".nfs{name}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def test_starts_and_saves_reuse_the_name_of_a_checkpoint_that_somebody_still_reads(
    tmp_path, monkeypatch
):
    make(tmp_path, "step_5", "step_5.replaced", "step_9.partial")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_of_nfs)
        for _ in range(3):
            remove_leftovers(tmp_path)
            assert candidates(tmp_path) == [5]
            assert (tmp_path / "step_9.partial").exists(), "it could not be removed"
            remove(tmp_path / "step_9.partial")
            make(tmp_path, "step_9.partial")
        make(tmp_path, "step_20.partial")
        publish(tmp_path / "step_20.partial", 20, keep=1)
        assert candidates(tmp_path) == [20]
    publish(tmp_path / "step_9.partial", 9, keep=1)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"step_9", "LATEST"}
