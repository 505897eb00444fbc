"""Whole runs whose training state leaves its device while the engine generates."""

import signal
from pathlib import Path

import pytest

from helpers.jobs import NUM_RANKS, Runs, assert_same_run
from helpers.sabotage import InPhase, die
from megatron_grpo.checkpoints.folders import latest_step

SLEEPS = "rollout.enable_sleep_mode=true"
ALL_LEAVES = ("train.offload=all", "train.offload_communicators=true")


@pytest.mark.slow
def test_a_run_whose_state_and_communicators_leave_is_the_same_run(
    runs: Runs, undisturbed: Path, tmp_path: Path
) -> None:
    ended = runs.finish(tmp_path, SLEEPS, *ALL_LEAVES)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_run_that_is_killed_while_its_state_is_away_goes_on_with_less_of_it_away(
    runs: Runs, undisturbed: Path, tmp_path: Path
) -> None:
    """Rank 1 dies after the save between two generations, when the host has all of the state."""
    run_dir = tmp_path / "run"
    with runs.start(run_dir, SLEEPS, *ALL_LEAVES, sabotage=InPhase(die, 1, "save", nth=3)) as job:
        ended = job.end(90)
    assert ended.exit_codes[1] == -signal.SIGKILL and ended.survivors == []
    assert latest_step(run_dir / "checkpoints") == 2
    ended = runs.finish(run_dir, SLEEPS, "train.offload=optimizer")
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert_same_run(run_dir, undisturbed)
