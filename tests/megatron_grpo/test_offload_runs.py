"""Whole runs whose training state leaves its device while the engine generates."""

import signal
from pathlib import Path

import pytest

from helpers.jobs import NUM_RANKS, Runs, assert_same_run
from helpers.sabotage import InCall, InPhase, die

SLEEPS = "rollout.enable_sleep_mode=true"
ALL_LEAVES = ("train.offload=all", "train.offload_communicators=true")


@pytest.mark.slow
def test_a_run_whose_state_and_communicators_leave_is_the_same_run(
    runs: Runs, undisturbed: Path, tmp_path: Path
) -> None:
    ended = runs.finish(tmp_path, SLEEPS, *ALL_LEAVES)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert_same_run(tmp_path, undisturbed)


RESIDENCY = "megatron_grpo.policy.residency"
# After the second of four steps rank 1 dies between two generations, or when the second begins. In
# each push ranks wait for each other when the optimizer has left, and when weights have; two
# pushes, and two times that all has come back, are before the first step.
MOVES = {
    "the optimizer has left": InCall(die, 1, RESIDENCY, "wait_for_all", nth=5),
    "weights have left": InCall(die, 1, RESIDENCY, "wait_for_all", nth=6),
    "all is away": InPhase(die, 1, "save", nth=2),
    "all comes back": InPhase(die, 1, "sleep", nth=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", MOVES.values(), ids=MOVES)
def test_a_run_that_is_killed_while_its_state_moves_goes_on_with_less_of_it_away(
    runs: Runs, undisturbed: Path, tmp_path: Path, sabotage: InCall | InPhase
) -> None:
    run_dir = tmp_path / "run"
    with runs.start(run_dir, SLEEPS, *ALL_LEAVES, sabotage=sabotage) as job:
        ended = job.end(90)
    assert ended.exit_codes[1] == -signal.SIGKILL and ended.survivors == []
    ended = runs.finish(run_dir, SLEEPS, "train.offload=optimizer")
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert_same_run(run_dir, undisturbed)
