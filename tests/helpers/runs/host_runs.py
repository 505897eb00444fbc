"""Runs of the tiny config whose ranks are on hosts of tests/helpers/runs/hosts.py."""

import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.engines.live import wait_until
from helpers.runs.hosts import Host
from helpers.runs.jobs import Ended, Job, layout
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

NAMES = ("alpha", "beta", "gamma", "delta", "second", "engine")
"""Four hosts for ranks, and two for engines."""
ENGINES = ("rollout.base_urls=[http://engine:8000]", "rollout.base_urls=[http://second:8000]")
BOTH_ENGINES = "rollout.base_urls=[http://engine:8000,http://second:8000]"
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


def serve(given: Sequence[str], *hosts: Host, port: int = 8000, log_dir: Path) -> None:
    """Start an engine on each of `hosts`, and wait until all serve."""
    for host in hosts:
        name = f"{host.name}_{port}"
        command = [sys.executable, "-m", "megatron_grpo", "serve", TINY_CONFIG, *given]
        command += [f"train.run_dir={log_dir / name}", f"--host={host.address}", f"--port={port}"]
        host.start(*command, log=log_dir / f"{name}.log", environment=ENVIRONMENT)
    for host in hosts:
        assert wait_until(lambda host=host: (host.address, port) in host.listeners(), 120)
