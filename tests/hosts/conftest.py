"""Hosts, and an engine on one of them, for all tests of runs over several hosts."""

from pathlib import Path

import pytest

from helpers.runs.host_runs import NAMES, finish, serve
from helpers.runs.hosts import running_hosts
from helpers.runs.jobs import write_sums


@pytest.fixture(scope="session")
def given(tied_model, tmp_path_factory):
    """Arguments of every run."""
    return [
        f"model.path={tied_model}",
        f"data.path={write_sums(tmp_path_factory.mktemp('data'))}",
        "train.num_steps=4",
        "train.save_interval=1",
        "grpo.steps_per_generation=2",
        "rollout.health_timeout=5",
        "rollout.base_urls=[http://engine:8000]",
    ]


@pytest.fixture(scope="session")
def hosts(given, tmp_path_factory):
    """Four hosts for ranks, and two with an engine that serves."""
    folder = tmp_path_factory.mktemp("hosts")
    with running_hosts(folder, NAMES) as hosts:
        serve(given, *hosts[4:], log_dir=folder)
        yield hosts


@pytest.fixture(scope="session")
def one_host(hosts, given, tmp_path_factory):
    """Starts a run of one host, once for each layout; returns its run directory."""
    folder = tmp_path_factory.mktemp("one_host")

    def one_host(*axes: str) -> Path:
        run_dir = folder / "_".join(axes)
        if not run_dir.exists():
            finish(given, run_dir, hosts[:1], axes=axes)
        return run_dir

    return one_host
