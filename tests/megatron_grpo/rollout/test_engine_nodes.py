"""The nodes of an engine start together, and each learns when another has ended."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.launch.key_proof import proof
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.rollout.engine_nodes import await_end, connected
from megatron_grpo.rollout.server import LOOPBACK, reserve_port

KEY, SETTINGS = "a key of this job", "rollout.tensor_parallel_size=4"


class Nodes:
    """The nodes of one engine, each in a thread, which leaves when it is told to."""

    def __init__(self, nnodes: int, threads: ThreadPoolExecutor) -> None:
        self.nnodes, self._threads = nnodes, threads
        with reserve_port() as reserved:
            self.port = reserved.getsockname()[1]
        self.entered: list[int] = []
        self.leave = threading.Event()

    def start(
        self, rank: int, key: str = KEY, settings: str = SETTINGS, timeout: float = 30.0
    ) -> Future[int]:
        """The future is the number of connections that the node had."""
        node = EngineNode(self.nnodes, rank, LOOPBACK, self.port)
        return self._threads.submit(self._run, node, key, settings, timeout)

    def _run(self, node: EngineNode, key: str, settings: str, timeout: float) -> int:
        with connected(node, key, settings, timeout) as others:
            self.entered.append(node.node_rank)
            assert self.leave.wait(30)
            return len(others)


@pytest.fixture
def nodes():
    with ThreadPoolExecutor(8) as threads:
        yield lambda nnodes: Nodes(nnodes, threads)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_start_together_whichever_is_there_first(
    nodes: Callable[[int], Nodes], order
) -> None:
    engine = nodes(3)
    early = [engine.start(rank) for rank in order[:2]]
    time.sleep(1)
    assert engine.entered == []
    last = engine.start(order[2])
    engine.leave.set()
    assert sorted(future.result(30) for future in [*early, last]) == [1, 1, 2]
    assert sorted(engine.entered) == [0, 1, 2]


def test_a_node_that_was_started_again_takes_its_place(nodes: Callable[[int], Nodes]) -> None:
    engine = nodes(3)
    first = engine.start(0)
    with joining(engine.port) as lost, joining(engine.port) as again:
        for node_1 in (lost, again):
            introduce(node_1, rank=1)  # node 0 has taken up this connection, and takes the next
        last = engine.start(2)
        engine.leave.set()
        assert [first.result(30), last.result(30)] == [2, 1]
        assert json.loads(again.recv(1000)) == {"start": proof(KEY, "a challenge", 0)}
        assert lost.recv(1000) == b""  # closed


def test_other_programs_do_no_harm(nodes: Callable[[int], Nodes]) -> None:
    """Job scripts probe ports, and anyone may connect and say nothing, or something else."""
    engine = nodes(2)
    first = engine.start(0)
    with ExitStack() as stack:
        for said in (b"GET /health HTTP/1.1\r\n\r\n", b"[]\n", b"[" * 4000 + b"\n", b"{"):
            stack.enter_context(joining(engine.port)).sendall(said)
        with joining(engine.port):  # closed without a word
            pass
        second = engine.start(1)
        engine.leave.set()
        assert [first.result(30), second.result(30)] == [1, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"key": "another"}, "node 0 of this engine, at 127.0.0.1 port .*another MEGATRON_GRPO"),
        (
            {"settings": "rollout.tensor_parallel_size=8"},
            "was started with rollout.tensor_parallel_size=4, and this node with .*_size=8",
        ),
    ],
)
def test_a_node_of_another_engine_is_refused(
    nodes: Callable[[int], Nodes], other: dict[str, str], message: str
) -> None:
    engine = nodes(2)
    first = engine.start(0)
    with pytest.raises(ValueError, match=message):
        engine.start(1, **other).result(30)
    assert engine.entered == []
    second = engine.start(1)
    engine.leave.set()
    assert [first.result(30), second.result(30)] == [1, 1]


def test_a_node_starts_for_no_other_program(nodes: Callable[[int], Nodes]) -> None:
    """What listens at the port does not know the key: it cannot answer the node's challenge."""
    engine = nodes(2)
    with socket.create_server((LOOPBACK, engine.port)) as listener:
        node = engine.start(1, timeout=1)
        for start in (b"{}\n", b'{"start": "yes"}\n'):
            with listener.accept()[0] as accepted:
                accepted.sendall(b'{"challenge": "0"}\n')
                assert b"proof" in accepted.recv(1000)
                accepted.sendall(start)
                time.sleep(1)
        with pytest.raises(TimeoutError, match="node 0 of this engine does not answer at"):
            node.result(30)
    assert engine.entered == []


def test_long_settings_are_compared_as_well(nodes: Callable[[int], Nodes]) -> None:
    engine, settings = nodes(2), "x" * 100_000
    both = [engine.start(rank, settings=settings) for rank in range(2)]
    engine.leave.set()
    assert [future.result(30) for future in both] == [1, 1]


def test_a_missing_node_is_named(nodes: Callable[[int], Nodes]) -> None:
    engine = nodes(3)
    first, last = engine.start(0, timeout=2), engine.start(2, timeout=4)
    with pytest.raises(TimeoutError, match=r"node 1 of this engine has not come to 127.0.0.1 port"):
        first.result(10)
    with pytest.raises(TimeoutError, match=r"node 0 of this engine does not answer at 127.0.0.1"):
        last.result(30)


def test_node_0_needs_a_free_port_of_its_host(nodes: Callable[[int], Nodes]) -> None:
    engine = nodes(2)
    with (
        socket.create_server((LOOPBACK, engine.port)),
        pytest.raises(EngineError, match=f"port {engine.port} .*in use.* a free port with"),
    ):
        engine.start(0).result(10)
    of_another_host = EngineNode(2, 0, "192.0.2.1")
    with (
        pytest.raises(ValueError, match=r"listen at 192\.0\.2\.1 .*an address of this host with"),
        connected(of_another_host, KEY, SETTINGS, 1),
    ):
        pass


def test_the_end_of_vllm_and_of_another_node_are_both_noticed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "100"]) as process:
        with pytest.raises(EngineError, match="another node of this engine has ended"):
            threading.Timer(1, theirs.close).start()
            await_end(process, [ours])
        process.kill()
        process.wait(10)
        with pytest.raises(EngineError, match=r"vLLM on this node of the engine .* signal SIGKILL"):
            await_end(process, [])
    with (
        subprocess.Popen(["sh", "-c", "exit 2"]) as process,  # as for an unknown argument
        pytest.raises(ValueError, match="exit code 2"),
    ):
        await_end(process, [])


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "message"),
    [
        (3, 0, r"--nnodes 3 does not divide .*_size 4: use one of \[1, 2, 4\]"),
        (0, 0, "--nnodes 0 does not divide"),
        (2, 2, r"--node-rank 2 is not one of 2 nodes \(--nnodes\): use 0 to 1"),
        (2, -1, "--node-rank -1 is not one of 2"),
    ],
)
def test_a_node_must_be_one_of_its_engine(nnodes: int, node_rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineNode(nnodes, node_rank).check(4)


def joining(port: int) -> socket.socket:
    """A connection to node 0, as soon as it listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((LOOPBACK, port), 10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def introduce(connection: socket.socket, rank: int) -> None:
    """What the node of `rank` says first, when node 0 has taken up its connection."""
    challenge = json.loads(connection.recv(1000))["challenge"]
    words = {
        "node_rank": rank,
        "proof": proof(KEY, challenge, rank),
        "challenge": "a challenge",
        "settings": SETTINGS,
    }
    connection.sendall(json.dumps(words).encode() + b"\n")
