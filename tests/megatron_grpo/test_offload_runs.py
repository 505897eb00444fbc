"""Whole runs whose state leaves the device while the engine generates."""

import gc
import signal
from threading import Event

import pytest

from helpers.oracle.optimizers import allow_offload
from helpers.runs.jobs import assert_same_run
from helpers.runs.sabotage import InCall, InPhase, die
from megatron_grpo import train_step
from megatron_grpo.checkpoints import manifest
from megatron_grpo.checkpoints.checkpointer import Checkpoints
from megatron_grpo.policy.residency import Residency

SLEEPS = "rollout.enable_sleep_mode=true"
ALL_LEAVES = ("train.offload=all", "train.offload_communicators=true")


def print_and_die() -> None:
    """Die, and print which parts have no memory at this moment."""
    (residency,) = (each for each in gc.get_objects() if isinstance(each, Residency) and each.rooms)
    gone = {room.part for room in residency.rooms if not room.values.untyped_storage().nbytes()}
    print("gone:", *sorted(gone), flush=True)
    die()


WAITS = ("megatron_grpo.policy.residency", "wait_for_all")
LOOKS = ("megatron_grpo.policy.residency", "parts_away")
# Rank 1 dies after the fourth step, between two generations, when the second is saved; or after the
# second step. In a push ranks wait for each other twice: when the optimizer has left, and when
# weights have; three pushes come before. Rank 1 looks up the parts to move in each phase, and when
# it starts to copy ahead: sixteen times before the fourth step has ended.
OPTIMIZER = "gradients optimizer reference"
ALL = f"{OPTIMIZER} weights"
MOVES = {
    "the optimizer is copied": (InCall(print_and_die, 1, *LOOKS, nth=18), "", "step_2"),
    "weights are copied": (InCall(print_and_die, 1, *LOOKS, nth=20), OPTIMIZER, "step_2"),
    "the optimizer has left": (InCall(print_and_die, 1, *WAITS, nth=7), OPTIMIZER, "step_2"),
    "weights have left": (InCall(print_and_die, 1, *WAITS, nth=8), ALL, "step_2"),
    "all is away": (InPhase(print_and_die, 1, "save", nth=4), ALL, "step_2"),
    "all comes back": (InPhase(print_and_die, 1, "sleep", nth=3), ALL, "step_2"),
}
"""Where rank 1 dies, the parts without memory then, and the newest checkpoint."""
LESS = {"all is away": "[gradients, weights]"}
"""`train.offload` of the resumed run; else the optimizer."""


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_run_killed_while_its_state_moves_goes_on(runs, undisturbed, tmp_path, move):
    sabotage, gone, newest = MOVES[move]
    run_dir = tmp_path / "run"
    with runs.start(run_dir, SLEEPS, *ALL_LEAVES, sabotage=sabotage) as job:
        ended = job.end(90)
    assert ended.exit_codes[1] == -signal.SIGKILL and ended.survivors == []
    parts = ended.outputs[1].partition("gone: ")[2].partition("\n")[0]
    assert parts == gone
    assert (run_dir / "checkpoints" / "LATEST").read_text() == f"{newest}\n"
    less = LESS.get(move, "optimizer")
    runs.finish(run_dir, SLEEPS, f"train.offload={less}")
    assert_same_run(run_dir, undisturbed)


def write_late(rank: int) -> None:
    """Let the optimizer's state be on the host, and write the first checkpoint as late as the next
    update allows; say so if what it holds has changed since the save."""
    allow_offload()
    may_write, write = Event(), manifest.write_hashed
    start_save, before_update = Checkpoints.save, Checkpoints.before_update
    apply_gradient = train_step.apply_gradient

    def late(path, parts):
        parts = [*parts]
        saved = b"".join(parts)
        may_write.wait()
        if b"".join(parts) != saved:
            print("changed while it was saved", flush=True)
        return write(path, parts)

    def save(checkpoints, state, *arguments):
        if state.step < 4:
            may_write.clear()
        start_save(checkpoints, state, *arguments)

    def let_write(checkpoints, timer):
        may_write.set()
        before_update(checkpoints, timer)

    def apply(*arguments):
        apply_gradient(*arguments)
        may_write.set()  # too late

    manifest.write_hashed, Checkpoints.save = late, save
    Checkpoints.before_update = let_write
    train_step.apply_gradient = apply


@pytest.mark.long
def test_run_updates_no_state_of_the_host_that_is_being_saved(runs, tmp_path):
    kept = tmp_path / "kept"
    runs.finish(kept, "train.num_steps=4", "train.save_generations=true")
    # Replayed, as the engine has float32 weights.
    trained = f"train.replay={kept}", "train.num_steps=4", "model.dtype=bfloat16"
    on_host = "optimizer.optimizer_cpu_offload=true"
    ended = runs.finish(tmp_path / "run", *trained, on_host, sabotage=write_late)
    assert "changed while" not in ended.output
