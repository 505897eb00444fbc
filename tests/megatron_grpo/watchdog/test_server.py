"""Clients of rank 0's server, ranks or not."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.runs.watched import LIMITS
from megatron_grpo.watchdog.connections import (
    MAX_LINE_BYTES,
    ServerAddress,
    WatchdogServer,
    connect,
    encode_line,
)
from megatron_grpo.watchdog.job import Intervals

INTERVALS = Intervals(heartbeat=0.2, grace=0.1)
TOKEN = "of the job"
STOP = encode_line(stop={"code": 1, "text": "stopped"})
STOPPED = {"end": {"code": 1, "text": "stopped"}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchdogServer]:
    """The server of a job of two ranks, none of which has connected."""
    server = WatchdogServer("127.0.0.1", 2, LIMITS, tmp_path / "stacks.txt", INTERVALS, TOKEN)
    yield server
    server.join()  # every test ends the job


@pytest.fixture
def join(server: WatchdogServer) -> Iterator[Callable[..., socket.socket]]:
    """Connects as a rank, until the test is over."""
    with ExitStack() as ranks:
        yield lambda rank, token=TOKEN: ranks.enter_context(
            connect(server.address, rank, token, timeout=30)
        )


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
        encode_line(rank=1, host="here", pid=1),
        encode_line(rank="1", host="here", pid=1, proof=""),
        encode_line(rank=2, host="here", pid=1, proof=""),
        encode_line(rank=0, host="here", pid=1, proof=""),  # rank 0 has connected
    ],
)
def test_server_hangs_up_on_clients_that_are_no_ranks(server, join, first):
    rank_0 = join(0)
    assert receive(rank_0, "heartbeat")
    with socket.create_connection((server.address.host, server.address.port)) as stranger:
        with suppress(ConnectionError):  # closed before all of it was sent
            stranger.sendall(first)
        assert receive(stranger, "end") is None
    rank_0.sendall(STOP)
    assert receive(rank_0, "end") == STOPPED


@pytest.mark.parametrize("token", ["", "of another job"])
def test_server_refuses_a_rank_with_another_token_and_waits_for_the_right_one(server, join, token):
    rank_0 = join(0)
    with pytest.raises(ValueError, match=r"rank 1 on .* has another MEGATRON_GRPO_TOKEN than rank"):
        join(1, token)
    rank_1 = join(1)
    rank_0.sendall(STOP)
    assert receive(rank_1, "end") == STOPPED


@pytest.mark.parametrize("answer", [b"", STOP, b"0" * 64])
def test_a_rank_refuses_a_server_without_the_token(answer):
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = ServerAddress("rank 0", *impostor.getsockname())
        with ThreadPoolExecutor() as pool:
            rank = pool.submit(connect, address, 1, TOKEN, 30)
            with impostor.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(answer)
        with pytest.raises(ValueError, match="has another MEGATRON_GRPO_TOKEN than rank 0 at 127"):
            rank.result()


def test_a_proof_is_worthless_at_another_address_and_for_another_rank():
    ours, theirs = (ServerAddress("rank 0", "10.0.0.1", port) for port in (1, 2))
    assert len({each.proof(f"rank {n}", TOKEN) for each in (ours, theirs) for n in (0, 1)}) == 4


def test_server_hangs_up_on_a_client_that_stays_silent(tmp_path):
    quick = replace(INTERVALS, silence=0.5)
    server = WatchdogServer("127.0.0.1", 1, LIMITS, tmp_path / "stacks.txt", quick, TOKEN)
    host, port = server.address.host, server.address.port
    with socket.create_connection((host, port), timeout=30) as stranger:
        assert stranger.recv(1) == b""
    with connect(server.address, 0, TOKEN, timeout=30) as rank_0:
        rank_0.sendall(STOP)
        server.join()


def test_server_ends_the_job_at_an_unknown_message(server, join):
    ranks = [join(rank) for rank in (0, 1)]
    ranks[1].sendall(encode_line(heartbeat={"unknown": 1}))
    assert "rank 1 on " in receive(ranks[0], "end")["end"]["text"]


def test_server_sends_the_signal_to_a_late_rank(server, join):
    first = join(0)
    first.sendall(encode_line(preempt=True))
    assert receive(first, "preempt") == {"preempt": True}
    second = join(1)
    assert receive(second, "preempt") == {"preempt": True}
    first.sendall(STOP)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["never ends", "fails"])
def test_verdict_is_sent_where_the_stacks_cannot_be_written(make, server, join, tmp_path):
    """The ranks may hang in that very file system."""
    make(tmp_path / "stacks.txt")
    ranks = [join(rank) for rank in (0, 1)]
    ranks[1].sendall(encode_line(failure={"text": "lower it", "trace": "Traceback"}))
    for rank in reversed(ranks):
        assert receive(rank, "end")["end"]["text"] == "megatron-grpo: lower it"
        rank.close()


def test_server_loses_a_rank_whose_host_no_longer_answers(server, join):
    """Linux gives up sending there with ETIMEDOUT, which is no ConnectionError."""
    first, second = (join(rank) for rank in range(2))
    assert receive(first, "heartbeat") and receive(second, "heartbeat")
    transport = server._ranks[1].get_extra_info("socket")
    transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
    with socket.socket(fileno=os.dup(transport.fileno())) as lost, suppress(BlockingIOError):
        while True:  # until the kernels take no more, as nobody reads
            lost.send(b"x" * (1 << 20))
    end = receive(first, "end")
    assert end is not None and "rank 1 on " in end["end"]["text"]
    assert "died" in end["end"]["text"]
