"""Jobs that run only engines and join the run of another job, on a real Slurm."""

import pytest

from helpers.runs.slurm_cluster import PACKAGES, Job, is_installed
from helpers.runs.slurm_jobs import Submitted
from helpers.runs.train import read_metrics

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason=f"needs Slurm: apt-get install {PACKAGES}"),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # three engines of vLLM start
]
IN_FLIGHT = [
    "rollout.max_staleness=2",
    "rollout.in_flight_updates=true",
    "grpo.rollout_importance_sampling_mode=token_truncate",
]

# Cores are left for the engines that start.
SLOW_REWARD = """
import time

def digits(completions, **_):
    time.sleep(2)
    return [sum(c.isdigit() for c in text) for text in completions]
"""


def await_engines(run: Submitted, number: int) -> None:
    """Wait for a step with completions of `number` engines."""
    run.wait_for(lambda: read_metrics(run.run_dir)[-1]["rollout/num_engines"] == number, 400)


def await_leave(run: Submitted, engine: Job, *states: str) -> None:
    """Wait until an engine's job has ended, and the run has made three steps without it."""
    ended = engine.await_state("COMPLETED", "FAILED", "CANCELLED", seconds=60)
    assert ended["JobState"] in states, engine.output() + run.logs()
    run.await_step(run.steps()[-1] + 3)


def test_engines_of_other_jobs_join_a_run_and_leave_it(submit, tmp_path):
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    slow = f"reward.functions=[{tmp_path / 'reward.py'}:digits]", "train.num_steps=5000"
    one_rank = "parallel.pipeline_parallel_size=1"
    run = submit(*IN_FLIGHT, *slow, one_rank, token="token-of-three-jobs")
    run.await_step(1, seconds=240)
    signalled, cancelled = run.add_engine("signalled"), run.add_engine("cancelled")
    await_engines(run, 3)
    assert len([*(run.run_dir / "engines").iterdir()]) == 2

    signalled.signal("USR1")
    await_leave(run, signalled, "COMPLETED")
    assert "is lost" not in run.logs()  # it was drained
    await_engines(run, 2)

    cancelled.cancel()
    await_leave(run, cancelled, "CANCELLED")
    await_engines(run, 1)
    assert not [*(run.run_dir / "engines").iterdir()]
    assert run.job.state == "RUNNING" and run.restarts() == 0, run.logs()
    run.job.cancel()
    assert run.await_silence() == []
