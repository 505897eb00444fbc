"""Runs that are killed again and again at random moments lose nothing."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helpers.runs.in_flight import (
    Key,
    Part,
    check_nothing_lost,
    check_run,
    has_checkpoint,
    saved_parts,
)
from helpers.runs.jobs import Job, Runs, assert_same_run
from helpers.runs.train import steps_of

pytestmark = pytest.mark.timed

LONGEST_LIFE = 7.0
"""Seconds; an undisturbed run takes about as long, start included."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_any_moment_change_nothing(num_kills, runs, undisturbed, tmp_path):
    """At seeded moments from the first second to the end: in starts, steps, pushes and saves."""
    kill_and_compare(num_kills, runs, tmp_path, undisturbed)


def kill_and_compare(
    num_kills: int, runs: Runs, folder: Path, undisturbed: Path, *options: str
) -> None:
    moments = random.Random(num_kills)
    kills = num_runs = 0
    while kills < num_kills:
        run_dir = folder / f"run_{num_runs}"
        num_runs += 1
        start = partial(runs.start, run_dir, *options)
        while not is_complete(start, moments, kill=kills < num_kills):
            kills += 1
        assert_same_run(run_dir, undisturbed)


ADAPTERS = (
    "lora.r=4",
    "lora.sync=merged",
    "grpo.sync_ref_model=true",
    "grpo.ref_model_sync_steps=1",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_no_adapters(runs, tmp_path):
    """Adapters stay, and so does the reference's copy of them."""
    undisturbed = tmp_path / "undisturbed"
    runs.finish(undisturbed, *ADAPTERS)
    kill_and_compare(15, runs, tmp_path, undisturbed, *ADAPTERS)


OLDEST, NUM_STEPS = 4, 12
IN_FLIGHT = (
    f"rollout.max_staleness={OLDEST}",
    "rollout.stop_token_ids=[7,8]",
    f"train.num_steps={NUM_STEPS}",
    "train.save_interval=1",
    "train.save_generations=true",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_kills", "over_sampling"), [(50, 2), (10, 1)])
def test_kills_lose_no_sample_of_a_checkpoint(num_kills, over_sampling, in_flight_runs):
    """With updates in flight, where no two runs are the same."""
    moments = random.Random(num_kills)
    kills = num_runs = 0
    while kills < num_kills:
        name = f"{num_kills}_kills_{num_runs}"
        run_dir, saved = in_flight_runs.folder / name, list[dict[Key, Part]]()
        num_runs += 1
        option = f"rollout.over_sampling={over_sampling}"
        start = partial(in_flight_runs.start, name, *IN_FLIGHT, option)
        while not is_complete(start, moments, run_dir, kill=kills < num_kills):
            kills += 1
            if has_checkpoint(run_dir):
                saved.append(saved_parts(run_dir))
        check_run(run_dir, NUM_STEPS, OLDEST)
        check_nothing_lost(run_dir, saved, NUM_STEPS)
        whole = sum(part.is_whole for parts in saved for part in parts.values())
        print(f"{name}: {kills} kills, {len(saved)} with samples, {whole} of them whole")


def is_complete(
    start: Callable[[], Job],
    moments: random.Random,
    run_dir: Path | None = None,
    *,
    kill: bool,
) -> bool:
    """Kill one rank or all at a random moment, and return whether the run ended before.

    All are killed before they have met: see `Job.have_met`. With `run_dir`, mostly in the second
    after one of the first steps.
    """
    num_steps = moments.randrange(5) if run_dir else 0
    life = moments.uniform(0.5, 1.5 if num_steps else LONGEST_LIFE) if kill else 120
    with start() as job:
        if run_dir and kill:
            num_steps += len(steps_of(run_dir)) if num_steps else 0
            while job.is_running and len(steps_of(run_dir)) < num_steps:
                time.sleep(0.01)
        victims = [moments.randrange(len(job.ranks))] if moments.random() < 0.5 else []
        deadline = time.monotonic() + life
        while job.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        was_killed = job.is_running
        job.signal(signal.SIGKILL, *(victims if job.have_met else ()))
        ended = job.end(60)
    assert ended.survivors == []
    if not was_killed:
        assert ended.exit_codes == [0] * len(job.ranks), ended.output
    return not was_killed
