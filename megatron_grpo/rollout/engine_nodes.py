"""The connections between the nodes of an engine that spans several.

vLLM's processes do not notice when those on another node end: the first node would wait for its
workers, and these for the first node. So a process on every node starts vLLM there, and is
connected to the one on the first node. When a connection breaks, all end what they have started.
"""

import errno
import json
import math
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.launch.exit_status import exit_words
from megatron_grpo.launch.key_proof import is_proof, proof
from megatron_grpo.rollout.engine_error import EngineError

REFUSED = 2
"""Exit code of a process that does not take its arguments."""
ANSWER_SECONDS = 5.0
"""Within which a node of ours answers; what else uses the port may say nothing."""
RETRY_SECONDS = 0.5
LOOK_SECONDS = 0.2
MAX_LINE_BYTES = 1 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A node without power closes no connection: the kernel finds out within 25 s."""


@dataclass(frozen=True)
class Other:
    """Another node, as node 0 sees it."""

    connection: socket.socket
    answer: str
    """To its challenge."""


@contextmanager
def connected(
    node: EngineNode, key: str, settings: str, timeout: float
) -> Iterator[Sequence[socket.socket]]:
    """Connect `node`: node 0 to all others, the others to node 0. All enter at the same time.

    Raises ValueError if a node does not know the `key` of node 0 or has other `settings`, and
    TimeoutError if a node is missing for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if node.node_rank > 0:
        with _join(node, key, settings, deadline) as connection:
            yield [connection]
        return
    joined: dict[int, Other] = {}
    try:
        _accept_others(node, key, settings, deadline, joined)
        yield [other.connection for other in joined.values()]
    finally:
        for other in joined.values():
            other.connection.close()


def await_end(process: subprocess.Popen[bytes], others: Sequence[socket.socket]) -> NoReturn:
    """Raise when `process`, vLLM on this node, ends, or when the connection to a node breaks.

    ValueError if vLLM refuses its arguments, else EngineError.
    """
    while (code := process.poll()) is None:
        if select.select(others, [], [], LOOK_SECONDS)[0]:  # they send nothing, so they have ended
            raise EngineError("another node of this engine has ended")
    kind = ValueError if code == REFUSED else EngineError
    raise kind(f"vLLM on this node of the engine ended with {exit_words(code)}")


def _accept_others(
    node: EngineNode, key: str, settings: str, deadline: float, joined: dict[int, Other]
) -> None:
    """Put all other nodes into `joined`, by rank, and tell them when all are there."""
    with _listening(node) as listener:
        while missing := {*range(1, node.nnodes)} - {*joined}:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise TimeoutError(
                    f"node {min(missing)} of this engine has not come to {node.meeting_point} in "
                    "time (rollout.startup_timeout)"
                ) from None
            try:
                # A node that was started again takes the place of its first connection.
                rank, answer = _greet(connection, node, key, settings)
                joined[rank] = Other(connection, answer)
            except (OSError, ValueError):  # not one of ours, or it has ended
                connection.close()
    for other in joined.values():
        with suppress(OSError):  # it has ended, which `await_end` will see
            _say(other.connection, start=other.answer)


def _listening(node: EngineNode) -> socket.socket:
    try:
        family = socket.getaddrinfo(node.master_addr, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((node.master_addr, node.master_port), family=family)
    except OSError as error:
        # The port may be taken only until what used it has ended.
        kind = EngineError if error.errno == errno.EADDRINUSE else ValueError
        raise kind(
            f"node 0 cannot listen at {node.meeting_point} ({error.strerror}): give an address of "
            "this host with --master-addr, and a free port with --master-port"
        ) from None


def _greet(connection: socket.socket, node: EngineNode, key: str, settings: str) -> tuple[int, str]:
    """The rank of the node at the other end, and the answer to its challenge.

    Raises OSError or ValueError if it is not one of ours.
    """
    until = time.monotonic() + ANSWER_SECONDS
    challenge = secrets.token_hex(16)
    _say(connection, challenge=challenge)
    match _hear(connection, until):
        case {
            "node_rank": int(rank),
            "proof": str(given),
            "challenge": str(theirs),
            "settings": str(other),
        }:
            pass
        case said:
            raise ValueError(f"no node of this engine: {said}")
    if not is_proof(given, key, challenge, rank):
        _say(connection, refused="it has another MEGATRON_GRPO_TOKEN")
        raise ValueError("another token")
    if other != settings or rank not in range(1, node.nnodes):
        _say(connection, refused=f"it was started with {settings}, and this node with {other}")
        raise ValueError("another engine")
    _keep_alive(connection)
    return rank, proof(key, theirs, rank=0)


def _join(node: EngineNode, key: str, settings: str, deadline: float) -> socket.socket:
    """A connection to node 0, as soon as all nodes have joined."""
    while True:
        try:
            connection = socket.create_connection(
                (node.master_addr, node.master_port), ANSWER_SECONDS
            )
            try:
                _introduce(connection, node, key, settings)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:  # not there yet, or there is something else
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"node 0 of this engine does not answer at {node.meeting_point} in time "
                    f"(rollout.startup_timeout): {error}"
                ) from None
            time.sleep(RETRY_SECONDS)


def _introduce(connection: socket.socket, node: EngineNode, key: str, settings: str) -> None:
    """Return when node 0 says that all are there; raises OSError if it is not node 0."""
    match _hear(connection, time.monotonic() + ANSWER_SECONDS):
        case {"challenge": str(challenge)}:
            answer = proof(key, challenge, node.node_rank)
        case said:
            raise ConnectionError(f"it says {said}")
    ours = secrets.token_hex(16)
    _say(connection, node_rank=node.node_rank, proof=answer, challenge=ours, settings=settings)
    _keep_alive(connection)
    match _hear(connection):
        case {"refused": why}:
            raise ValueError(f"node 0 of this engine, at {node.meeting_point}: {why}")
        case {"start": str(given)} if is_proof(given, key, ours, rank=0):
            return
        case said:
            raise ConnectionError(f"it says {said}")


def _keep_alive(connection: socket.socket) -> None:
    """Let reads wait without limit, but only as long as the other node is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _say(connection: socket.socket, **words: Any) -> None:
    connection.settimeout(ANSWER_SECONDS)
    connection.sendall(json.dumps(words).encode() + b"\n")


def _hear(connection: socket.socket, until: float = math.inf) -> Any:
    """One line, which must be complete at `until` (monotonic)."""
    heard = b""
    while not heard.endswith(b"\n"):
        left = until - time.monotonic()
        connection.settimeout(None if math.isinf(left) else max(0.001, left))
        heard += (part := connection.recv(MAX_LINE_BYTES))
        if not part or len(heard) > MAX_LINE_BYTES:
            raise ConnectionError("it hung up" if heard == b"" else "it is no node of an engine")
    try:
        return json.loads(heard)
    except (ValueError, RecursionError):
        raise ConnectionError("it is no node of an engine") from None
