"""Clients of rank 0's server, ranks or not."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.runs.watched import LIMITS
from megatron_grpo.watchdog.connections import (
    MAX_LINE_BYTES,
    WatchdogServer,
    connect,
    encode_line,
)
from megatron_grpo.watchdog.job import Intervals

INTERVALS = Intervals(heartbeat=0.2, grace=0.1)
STOP = encode_line(stop={"code": 1, "text": "stopped"})
STOPPED = {"end": {"code": 1, "text": "stopped"}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchdogServer]:
    """The server of a job of two ranks, none of which has connected."""
    server = WatchdogServer("127.0.0.1", 2, LIMITS, tmp_path / "stacks.txt", INTERVALS)
    yield server
    server.join()  # every test ends the job


def receive(connection: socket.socket, field: str) -> dict | None:
    """The first message with `field`; None when the server has closed the connection."""
    connection.settimeout(30)
    with suppress(ConnectionResetError), connection.makefile("rb") as lines:
        for message in map(json.loads, lines):
            if field in message:
                return message
    return None


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * (MAX_LINE_BYTES + 1),
        encode_line(failure={"text": "lie"}),
        encode_line(rank="1", host="here", pid=1),
        encode_line(rank=2, host="here", pid=1),
        encode_line(rank=0, host="here", pid=1),  # rank 0 has connected
    ],
)
def test_server_hangs_up_on_clients_that_are_no_ranks(server, first):
    rank_0 = connect(server.address, 0, timeout=30)
    assert receive(rank_0, "heartbeat")
    stranger = socket.create_connection((server.address.host, server.address.port))
    with suppress(ConnectionError):  # closed before all of it was sent
        stranger.sendall(first)
    assert receive(stranger, "end") is None
    rank_0.sendall(STOP)
    assert receive(rank_0, "end") == STOPPED


def test_server_ends_the_job_at_an_unknown_message(server):
    ranks = [connect(server.address, rank, timeout=30) for rank in (0, 1)]
    ranks[1].sendall(encode_line(heartbeat={"unknown": 1}))
    assert "rank 1 on " in receive(ranks[0], "end")["end"]["text"]


def test_server_sends_the_signal_to_a_late_rank(server):
    first = connect(server.address, 0, timeout=30)
    first.sendall(encode_line(preempt=True))
    assert receive(first, "preempt") == {"preempt": True}
    second = connect(server.address, 1, timeout=30)
    assert receive(second, "preempt") == {"preempt": True}
    first.sendall(STOP)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["never ends", "fails"])
def test_verdict_is_sent_where_the_stacks_cannot_be_written(make, server, tmp_path):
    """The ranks may hang in that very file system."""
    make(tmp_path / "stacks.txt")
    ranks = [connect(server.address, rank, timeout=30) for rank in (0, 1)]
    ranks[1].sendall(encode_line(failure={"text": "lower it", "trace": "Traceback"}))
    for rank in reversed(ranks):
        assert receive(rank, "end")["end"]["text"] == "megatron-grpo: lower it"
        rank.close()


def test_server_loses_a_rank_whose_host_no_longer_answers(server):
    """Linux gives up sending there with ETIMEDOUT, which is no ConnectionError."""
    first, second = (connect(server.address, rank, timeout=30) for rank in range(2))
    assert receive(first, "heartbeat") and receive(second, "heartbeat")
    transport = server._ranks[1].get_extra_info("socket")
    transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
    with socket.socket(fileno=os.dup(transport.fileno())) as lost, suppress(BlockingIOError):
        while True:  # until the kernels take no more, as nobody reads
            lost.send(b"x" * (1 << 20))
    end = receive(first, "end")
    assert end is not None and "rank 1 on " in end["end"]["text"]
    assert "died" in end["end"]["text"]
