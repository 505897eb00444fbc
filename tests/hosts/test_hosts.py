"""Runs over several hosts: their bits are those of one host; faults are named, and leave nothing.

Each of the four ranks has a host of its own, and so has the engine: tests/helpers/runs/hosts.py.
"""

import time
from contextlib import ExitStack

import psutil
import pytest

from helpers.runs.host_runs import ENGINES, FOUR_RANKS, NAMES, finish, start
from helpers.runs.hosts import Host, can_make_hosts
from helpers.runs.jobs import Job, assert_same_run
from helpers.runs.sabotage import InPhase, slowly, stop, stop_and_linger
from helpers.runs.train import steps_of

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


# The host, what happens to its cable, and the phases of the runs that lose it at the same time.
LOSSES = {
    "of a rank": ("beta", Host.pull, Host.plug, ["train", "generate"]),
    "of a rank in a push": ("gamma", Host.pull, Host.plug, ["push"]),
    "of its sends alone": ("delta", Host.mute, Host.unmute, ["train"]),
    "of rank 0": ("alpha", Host.pull, Host.plug, ["train", "generate"]),
}


def stopped(job: Job, rank: int) -> psutil.Process:
    """Wait until a sabotage has stopped a rank."""
    at_home = psutil.Process(job.ranks[rank].pid)  # waits for the rank, which is on a host
    job.wait_for(lambda: psutil.STATUS_STOPPED in [p.status() for p in at_home.children()], 60)
    return at_home.children()[0]


@pytest.mark.parametrize(("name", "break_it", "mend", "phases"), LOSSES.values(), ids=LOSSES)
def test_a_host_whose_cable_is_out_is_named_and_all_ranks_end(
    name, break_it, mend, phases, hosts, given, one_host, tmp_path
):
    rank, jobs, waiting = NAMES.index(name), {}, []
    with ExitStack() as stack:
        for phase, engine in zip(phases, ENGINES, strict=False):
            # Rank 0 generates, and the other ranks wait.
            deed = (stop_and_linger, 0) if phase == "generate" else (stop, rank)
            sabotage = InPhase(*deed, phase)
            job = start(given, tmp_path / phase, hosts[:4], engine, sabotage=sabotage)
            jobs[phase] = stack.enter_context(job)
            waiting.append((job, sabotage.rank))
        at_work = [stopped(*each) for each in waiting]
        break_it(hosts[rank])
        for process in at_work:
            process.resume()
        all_ended = [job.end(45) for job in jobs.values()]
    mend(hosts[rank])
    for ended in all_ended:
        assert all(ended.exit_codes), ended.output
        assert f"rank {rank} on {name}" in ended.output
        assert "has not answered for 20 s" in ended.output
        assert ended.survivors == []
    for phase in phases:
        finish(given, tmp_path / phase, hosts[:4])
        assert_same_run(tmp_path / phase, one_host(*FOUR_RANKS))


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
