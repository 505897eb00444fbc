"""Launchers that meet on this host, each in a thread, by a real store."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from helpers.engines.live import wait_until
from megatron_grpo.launch import meeting
from megatron_grpo.launch.meeting import FAILED, HostFailed, HostPlace, Hosts
from megatron_grpo.launch.process import EXIT_PREEMPTED


@pytest.fixture
def port():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def meet(port: int, *given: tuple[int, str]) -> list[Hosts | BaseException]:
    """The meeting of hosts with these (number, digest), or what each of them raises."""

    def meet(rank: int, digest: str) -> Hosts | BaseException:
        try:
            return Hosts(HostPlace(2, rank, "127.0.0.1", port), digest)
        except (HostFailed, SystemExit) as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(meet, *zip(*given, strict=True)))


def test_hosts_know_each_others_addresses_and_the_first_failure(port):
    first, second = meet(port, (0, "job"), (1, "job"))
    with closing(first), closing(second):
        assert first.addresses == second.addresses == ["127.0.0.1", "127.0.0.1"]
        second.publish(FAILED, "2 no engine")
        assert wait_until(lambda: first.failed_code == second.failed_code == 2, 10)
        first.publish(FAILED, "1 another")
        with pytest.raises(HostFailed, match="no engine"):
            first.check()


def test_a_host_is_lost_when_its_store_has_not_answered_for_ten_minutes(port, monkeypatch):
    first, second = meet(port, (0, "job"), (1, "job"))
    with closing(first):
        second.close()
        answered = second._answered
        monkeypatch.setattr(meeting, "running_time", lambda: answered + 599)
        assert not second.is_over
        monkeypatch.setattr(meeting, "running_time", lambda: answered + 601)
        assert second.is_over


def test_hosts_with_different_commands_refuse_each_other(port):
    for error in meet(port, (0, "job"), (1, "another job")):
        assert error.args[0] == 2
        assert "host 1 (127.0.0.1) has other arguments" in error.args[1]


def test_a_number_that_is_given_twice_is_refused(port):
    met = meet(port, (0, "job"), (1, "job"), (1, "job"))
    [error] = [each for each in met if isinstance(each, HostFailed)]
    assert error.args == (2, "another host has --node-rank 1, too")
    for each in met:
        if isinstance(each, Hosts):
            each.close()


def test_a_missing_host_is_named_and_may_come_at_the_next_start(port, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "RENDEZVOUS_SECONDS", 0.2)
    for rank in (1, 0):
        [ended] = meet(port, (rank, "job"))
        assert ended.code == EXIT_PREEMPTED
    second, first = capsys.readouterr().err.splitlines()
    assert f"1 of 2 hosts did not connect to 127.0.0.1:{port} on " in first
    assert f"did not reach the first of the 2 at 127.0.0.1:{port} within 0.2 s" in second


def test_a_taken_port_and_an_address_of_another_host_are_named(port):
    with socket.create_server(("127.0.0.1", port)):
        [ended] = meet(port, (0, "job"))
    assert "another process has the port" in ended.code
    with pytest.raises(SystemExit, match="--master-addr the address of host 0, and this host 0"):
        Hosts(HostPlace(2, 0, "192.0.2.1", port))
