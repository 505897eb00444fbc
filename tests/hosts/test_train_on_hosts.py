"""`megatron-grpo train --nnodes`, the same command on every host."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.runs.clock import wrong_clock
from helpers.runs.host_runs import ENVIRONMENT
from helpers.runs.hosts import CABLE, Host, can_make_hosts
from helpers.runs.jobs import assert_same_run, layout
from helpers.runs.train import TINY_CONFIG, read_timeline, steps_of

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]


class Started:
    """`train --nnodes` on each of some hosts, with an engine on the last one or, without
    `has_engine`, the one that all tests share."""

    def __init__(
        self,
        hosts: list[Host],
        given: list[str],
        folder: Path,
        *arguments: str,
        num_hosts: int | None = None,
        master: str | None = None,
        has_engine: bool = True,
    ) -> None:
        self.hosts, self.run_dir = hosts, folder / "run"
        own = [each for each in given if not (has_engine and each.startswith("rollout.base_urls"))]
        own += [*layout("data"), *arguments, f"train.run_dir={self.run_dir}"]
        train = [sys.executable, "-m", "megatron_grpo", "train", TINY_CONFIG, *own]
        train += [f"--nnodes={num_hosts or len(hosts)}", "--gpus-per-node=1"]
        train += [f"--master-addr={master or hosts[0].name}"]
        self.engine_log = self.run_dir / "logs" / "engine_0.log"
        self.logs = [folder / f"{host.name}.log" for host in hosts]
        self.launchers = [
            host.start(
                *train,
                f"--node-rank={rank}",
                log=log,
                environment=ENVIRONMENT,
            )
            for rank, (host, log) in enumerate(zip(hosts, self.logs, strict=True))
        ]

    @property
    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def wait_for(self, condition, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.output}"
            time.sleep(0.1)

    def end(self, seconds: float) -> list[int]:
        """Exit codes of the launchers, which leave nothing behind."""
        for launcher in self.launchers:
            try:
                launcher.wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"runs after {seconds} s:\n{self.output}") from None
        self.wait_for(lambda: not set().union(*(host.processes() for host in self.hosts)), 10)
        return [launcher.returncode for launcher in self.launchers]


@pytest.fixture
def without_ipv4(hosts, one_host, tmp_path):
    """Three hosts with IPv6 alone."""
    one_host("data")  # while the engine can be reached
    three, known = hosts[:3], tmp_path / "hosts"
    addresses = [f"fd00:77::{host.number}" for host in three]
    lines = [f"{address} {host.name}" for address, host in zip(addresses, three, strict=True)]
    known.write_text("\n".join(["::1 localhost", *lines, ""]))
    for address, host in zip(addresses, three, strict=True):
        host.run("ip", "-4", "address", "flush", "dev", CABLE)
        host.run("ip", "address", "add", f"{address}/64", "dev", CABLE, "nodad")
        host.run("mount", "--bind", str(known), "/etc/hosts")
    yield three
    for host in three:
        host.run("umount", "/etc/hosts")
        host.run("ip", "address", "flush", "dev", CABLE, "scope", "global")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)


def test_a_run_is_stopped_and_resumes_on_hosts_with_ipv6_alone(
    without_ipv4, given, one_host, tmp_path
):
    """Stopped at the second host; resumed with the clock of the first an hour ahead."""
    run = Started(without_ipv4, given, tmp_path)
    run.wait_for(lambda: 1 in steps_of(run.run_dir), 120)
    run.hosts[1].run("pkill", "-TERM", "-f", "megatron_grpo train .* --nnodes")
    assert run.end(60) == [75, 75, 0], run.output
    with wrong_clock(run.hosts[0], 3600):
        again = Started(without_ipv4, given, tmp_path)
        assert again.end(120) == [0, 0, 0], again.output
    assert_same_run(run.run_dir, one_host("data"))
    assert read_timeline(run.run_dir)[-1]["ts"] / 1e6 > time.time() + 3000


def test_one_command_on_each_host_trains_as_on_one_host_though_its_engine_is_killed(
    hosts, given, one_host, tmp_path
):
    run = Started(hosts[:3], given, tmp_path)
    run.wait_for(lambda: 1 in steps_of(run.run_dir), 120)
    run.hosts[2].run("pkill", "-KILL", "-f", "vllm.entrypoints")
    assert run.end(120) == [0, 0, 0], run.output
    assert "started again" in run.engine_log.read_text()
    assert_same_run(run.run_dir, one_host("data"))


def test_a_host_whose_cable_is_out_is_named_and_the_run_ends_on_all_hosts(hosts, given, tmp_path):
    run = Started(hosts[:2], given, tmp_path, "train.num_steps=1000", has_engine=False)
    run.wait_for(lambda: 1 in steps_of(run.run_dir), 120)
    hosts[1].pull()
    ended = run.end(60)
    hosts[1].plug()
    assert all(ended), run.output
    assert "rank 1 on beta" in run.output and "has not answered for 20 s" in run.output


def test_an_engine_that_cannot_start_ends_the_run_on_all_hosts(hosts, given, tmp_path):
    run = Started(hosts[:3], given, tmp_path, "rollout.vllm.no_such_argument=1")
    assert run.end(60) == [2, 2, 2], run.output
    assert "engine 0 on gamma ended with exit code 2" in run.logs[0].read_text()


@pytest.fixture
def loopback_names(hosts, tmp_path):
    """The first two hosts map their own names to loopback, as Debian does."""
    pair = hosts[:2]
    for host in pair:
        known = tmp_path / f"hosts_of_{host.name}"
        known.write_text(f"127.0.1.1 {host.name}\n{hosts[-1].address} engine\n")
        host.run("mount", "--bind", str(known), "/etc/hosts")
    yield pair
    for host in pair:
        host.run("umount", "/etc/hosts")


def test_hosts_with_names_on_loopback_meet_at_an_address(loopback_names, given, tmp_path):
    refused = Started(loopback_names[:1], given, tmp_path, num_hosts=2, has_engine=False)
    assert refused.end(60) == [1]
    assert "alpha is 127.0.1.1 on alpha itself" in refused.output
    first = loopback_names[0].address
    run = Started(loopback_names, given, tmp_path, master=first, has_engine=False)
    assert run.end(120) == [0, 0], run.output
    assert "Traceback" not in run.output
