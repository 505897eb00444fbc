"""Runs of the tiny config whose ranks are on hosts of tests/helpers/runs/hosts.py."""

from pathlib import Path

from helpers.runs.jobs import Ended, Job, layout
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

NAMES = ("alpha", "beta", "gamma", "delta", "engine")
ENVIRONMENT = {TOKEN_VARIABLE: "a" * 64, "OMP_NUM_THREADS": "1"}
FOUR_RANKS = ("tensor", "pipeline")


def start(given, run_dir: Path, hosts, *arguments: str, axes=FOUR_RANKS, sabotage=None) -> Job:
    """A run with as many ranks on each of `hosts`."""
    given = [*layout(*axes), *given, *arguments, f"train.run_dir={run_dir}"]
    logs, token = run_dir.parent / f"{run_dir.name}_logs", ENVIRONMENT[TOKEN_VARIABLE]
    return Job(given, 2 ** len(axes), logs, token=token, hosts=hosts, sabotage=sabotage)


def finish(given, run_dir: Path, hosts, *arguments: str, code: int = 0, **how) -> Ended:
    with start(given, run_dir, hosts, *arguments, **how) as job:
        ended = job.end(120)
    assert ended.exit_codes == [code] * len(job.ranks), ended.output
    assert ended.survivors == []
    return ended
