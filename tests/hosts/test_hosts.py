"""Runs over several hosts: their bits are those of one host; faults are named, and leave nothing.

Each of the four ranks has a host of its own, and so has the engine: tests/helpers/runs/hosts.py.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.runs.host_runs import ENVIRONMENT, FOUR_RANKS, NAMES, finish, start
from helpers.runs.hosts import Host, can_make_hosts
from helpers.runs.jobs import assert_same_run, layout
from helpers.runs.sabotage import InPhase, slowly
from helpers.runs.train import TINY_CONFIG, steps_of

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(("axes", "num_hosts"), [(FOUR_RANKS, 4), (("data",), 2)])
def test_a_run_over_hosts_has_the_bits_of_one_host(
    axes, num_hosts, hosts, given, one_host, tmp_path
):
    finish(given, tmp_path / "run", hosts[:num_hosts], axes=axes)
    assert_same_run(tmp_path / "run", one_host(*axes))


def test_connections_are_accepted_at_documented_places_only(hosts, given, tmp_path):
    """Stores and gloo of ranks at their host's own address; of an engine only its port."""
    places = set()
    with start(given, tmp_path / "run", hosts[:2], axes=["data"]) as job:
        while job.is_running:
            places |= {(host.name, *place) for host in hosts for place in host.listeners()}
            time.sleep(0.2)
    of_ranks = {address for name, address, _ in places if name in ("alpha", "beta")}
    assert of_ranks == {hosts[0].address, hosts[1].address}
    of_engine = {(address, port) for name, address, port in places if name == "engine"}
    assert {at for at in of_engine if at[0] != "127.0.0.1"} == {(hosts[-1].address, 8000)}


def test_a_cable_that_is_out_for_five_seconds_changes_no_bit(hosts, given, one_host, tmp_path):
    run_dir, beta = tmp_path / "run", hosts[1]
    with start(given, run_dir, hosts[:4]) as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), 60)
        beta.pull()
        time.sleep(5)
        assert job.is_running
        beta.plug()
        ended = job.end(60)
    assert ended.exit_codes == [0] * 4, ended.output
    assert_same_run(run_dir, one_host(*FOUR_RANKS))


LOSSES = {
    "in a collective": ("beta", Host.pull, Host.plug, "train"),
    "in a push": ("gamma", Host.pull, Host.plug, "push"),
    "of its sends alone": ("delta", Host.mute, Host.unmute, "train"),
    "of rank 0": ("alpha", Host.pull, Host.plug, "train"),
}


@pytest.mark.parametrize(("name", "break_it", "mend", "phase"), LOSSES.values(), ids=LOSSES)
def test_a_host_whose_cable_is_out_is_named_and_all_ranks_end(
    name, break_it, mend, phase, hosts, given, one_host, tmp_path
):
    run_dir, rank = tmp_path / "run", NAMES.index(name)
    with start(given, run_dir, hosts[:4], sabotage=InPhase(slowly, rank, phase)) as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), 60)
        break_it(hosts[rank])
        ended = job.end(45)
    mend(hosts[rank])
    assert all(ended.exit_codes), ended.output
    assert f"rank {rank} on {name}" in ended.output
    assert "has not answered for 20 s" in ended.output
    assert ended.survivors == []
    finish(given, run_dir, hosts[:4])
    assert_same_run(run_dir, one_host(*FOUR_RANKS))


@pytest.mark.parametrize("name", ["alpha", "delta"])
def test_a_host_that_is_killed_ends_the_run_in_seconds(name, hosts, given, one_host, tmp_path):
    run_dir, rank = tmp_path / "run", NAMES.index(name)
    with start(given, run_dir, hosts[:4], sabotage=InPhase(slowly, rank, "train")) as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), 60)
        hosts[rank].kill()
        ended = job.end(10)
    hosts[rank].reboot()
    assert all(ended.exit_codes), ended.output
    assert f"rank {rank} on {name}" in ended.output
    assert ended.survivors == []
    finish(given, run_dir, hosts[:4])
    assert_same_run(run_dir, one_host(*FOUR_RANKS))


def test_a_run_waits_for_the_host_of_its_last_engine_and_gives_up_in_time(
    hosts, given, one_host, tmp_path
):
    engine = hosts[-1]
    back, gone = tmp_path / "back", tmp_path / "gone"
    with start(given, back, hosts[:4]) as job:
        job.wait_for(lambda: 1 in steps_of(back), 60)
        engine.pull()
        job.wait_for(lambda: "is lost" in job.output, 60)
        engine.plug()
        ended = job.end(60)
    assert ended.exit_codes == [0] * 4, ended.output
    assert_same_run(back, one_host(*FOUR_RANKS))

    with start(given, gone, hosts[:4], "rollout.startup_timeout=10") as job:
        job.wait_for(lambda: 1 in steps_of(gone), 60)
        engine.pull()
        ended = job.end(60)
    engine.plug()
    assert ended.exit_codes == [1] * 4, ended.output
    assert "no rollout engine serves any more" in ended.output
    finish(given, gone, hosts[:4])
    assert_same_run(gone, one_host(*FOUR_RANKS))


def await_end(process: subprocess.Popen[str], seconds: float, log: Path) -> int:
    """The exit code of a program."""
    deadline = time.monotonic() + seconds
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline, f"runs after {seconds} s:\n{log.read_text()}"
        time.sleep(0.05)
    return code


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


def launcher(given, folder: Path, host: Host, first: str, number: int):
    """Start the launcher of two hosts on the one with this number."""
    torchrun = [sys.executable, "-m", "megatron_grpo.launch.torchrun", "--nproc-per-node=1"]
    torchrun += ["--nnodes=2", f"--node-rank={number}", f"--log-dir={folder / host.name}"]
    torchrun += [f"--master-addr={first}", "--master-port=29500", "-m", "megatron_grpo", "train"]
    arguments = [*layout("tensor"), *given, f"train.run_dir={folder / 'run'}"]
    log = folder / f"{host.name}.log"
    return host.start(*torchrun, TINY_CONFIG, *arguments, log=log, environment=ENVIRONMENT), log


def test_hosts_with_names_on_loopback_meet_at_an_address(loopback_names, given, tmp_path):
    alpha, beta = loopback_names
    process, log = launcher(given, tmp_path, alpha, "alpha", 0)
    assert await_end(process, 30, log) == 1
    assert "alpha is 127.0.1.1 on alpha itself" in log.read_text()
    for process, log in [
        launcher(given, tmp_path, alpha, alpha.address, 0),
        launcher(given, tmp_path, beta, alpha.address, 1),
    ]:
        assert await_end(process, 120, log) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert alpha.processes() == beta.processes() == set()
