"""What clients of rank 0's server can do to it, ranks or not."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.watched import LIMITS
from megatron_grpo.watchdog.heartbeat import connect
from megatron_grpo.watchdog.job import Intervals
from megatron_grpo.watchdog.server import (
    MAX_LINE_BYTES,
    LineReader,
    WatchdogServer,
    encode_line,
)

INTERVALS = Intervals(heartbeat=0.2, grace=0.1)
RANK_1 = {"rank": 1, "host": "here", "pid": 1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchdogServer]:
    """The server of a job of two ranks, none of which has connected."""
    server = WatchdogServer("127.0.0.1", 2, LIMITS, tmp_path / "stacks.txt", INTERVALS)
    yield server
    server.join()  # every test ends the job


def receive(connection: socket.socket, field: str, seconds: float = 5) -> dict | None:
    """The first message with `field`; None when the server has closed the connection."""
    connection.settimeout(seconds)
    lines = LineReader()
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            for message in lines.feed(data):
                if field in message:
                    return message
    return None


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\n",
        b"[" * (MAX_LINE_BYTES + 1),
        encode_line(heartbeat={}),
        encode_line(failure={"text": "lie"}),
        encode_line(**RANK_1 | {"rank": "1"}),
        encode_line(**RANK_1 | {"rank": 2}),
        encode_line(**RANK_1 | {"rank": -1}),
        encode_line(rank=1, host="here"),
    ],
)
def test_client_whose_first_line_is_no_rank_is_hung_up_on_and_changes_nothing(server, first):
    stranger = socket.create_connection((server.address.host, server.address.port))
    with suppress(ConnectionError):  # closed before all of it was sent
        stranger.sendall(first)
    assert receive(stranger, "end") is None
    rank_0 = connect(server.address, 0, timeout=5)
    assert receive(rank_0, "heartbeat")
    rank_0.sendall(encode_line(stop={"code": 1, "text": "stopped"}))
    assert receive(rank_0, "end") == {"end": {"code": 1, "text": "stopped"}}


def test_second_client_with_the_same_rank_is_hung_up_on(server):
    rank_1, stranger = (connect(server.address, 1, timeout=5) for _ in range(2))
    assert receive(stranger, "end") is None
    rank_1.sendall(encode_line(stop={"code": 1, "text": "stopped"}))
    assert receive(rank_1, "end") == {"end": {"code": 1, "text": "stopped"}}


def test_message_with_unknown_fields_ends_the_job_like_a_death(server):
    ranks = [connect(server.address, rank, timeout=5) for rank in (0, 1)]
    ranks[1].sendall(encode_line(heartbeat={"unknown": 1}))
    assert receive(ranks[0], "end")["end"]["code"] == 1


def test_rank_that_connects_after_a_signal_is_told(server):
    first = connect(server.address, 0, timeout=5)
    first.sendall(encode_line(preempt=True))
    assert receive(first, "preempt") == {"preempt": True}
    second = connect(server.address, 1, timeout=5)
    assert receive(second, "preempt") == {"preempt": True}
    for rank in (first, second):
        rank.sendall(encode_line(finished={"code": 0}))  # its end is no death then


def test_rank_whose_host_no_longer_answers_is_lost_and_the_others_are_told(server):
    """Linux gives up what it sends there, with ETIMEDOUT, which is no ConnectionError."""
    first, second = (connect(server.address, rank, timeout=5) for rank in range(2))
    assert receive(first, "heartbeat") and receive(second, "heartbeat")
    [lost] = [c.socket for c in server._connections.copy() if c.rank == 1]
    lost.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
    with suppress(BlockingIOError):  # the kernels take no more while nobody reads
        while True:
            lost.send(b"x" * (1 << 20))
    end = receive(first, "end")
    assert end is not None and "rank 1 on " in end["end"]["text"]
    assert "died" in end["end"]["text"]
