"""A run that is killed again and again at random moments ends like one that nothing disturbed."""

import random
import signal
import time
from pathlib import Path

import pytest

from helpers.jobs import NUM_RANKS, Runs, assert_same_run

LONGEST_LIFE = 7.0
"""Seconds; an undisturbed run takes about as long, start included."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_any_moment_change_nothing(
    num_kills: int, runs: Runs, undisturbed: Path, tmp_path: Path
) -> None:
    """At seeded moments from the first second to the end: in starts, steps, pushes and saves."""
    moments = random.Random(num_kills)
    kills = num_runs = 0
    while kills < num_kills:
        run_dir = tmp_path / f"run_{num_runs}"
        num_runs += 1
        while not is_complete(runs, run_dir, moments, kill=kills < num_kills):
            kills += 1
        assert_same_run(run_dir, undisturbed)


def is_complete(runs: Runs, run_dir: Path, moments: random.Random, *, kill: bool) -> bool:
    """Start the run; kill one of its ranks, or all, unless it ends before. Whether it did.

    All before they have met: see `Job.have_met`.
    """
    life = moments.uniform(0.5, LONGEST_LIFE) if kill else 120
    victims = [moments.randrange(NUM_RANKS)] if moments.random() < 0.5 else []
    with runs.start(run_dir) as job:
        deadline = time.monotonic() + life
        while job.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        was_killed = job.is_running
        job.signal(signal.SIGKILL, *(victims if job.have_met else ()))
        ended = job.end(15)
    assert ended.survivors == []
    if not was_killed:
        assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    return not was_killed
