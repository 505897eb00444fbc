"""The connections between the nodes of an engine that spans several.

vLLM's processes do not notice when those on another node end: the first node would wait for its
workers, and these for the first node. So a process on every node starts vLLM there, and is
connected to the one on the first node. When a connection breaks, all end what they have started.
"""

import errno
import json
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.launch.exit_status import exit_words
from megatron_grpo.launch.key_proof import is_proof, proof
from megatron_grpo.rollout.engine_error import EngineError

ANSWER_SECONDS = 5.0
"""Within which a node of ours answers; what else uses the port may say nothing."""
RETRY_SECONDS = 0.5
LOOK_SECONDS = 0.2
MAX_LINE_BYTES = 4096
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A node without power closes no connection: the kernel finds out within 25 s."""


@contextmanager
def connected(
    node: EngineNode, key: str, settings: str, timeout: float
) -> Iterator[Sequence[socket.socket]]:
    """Connect `node`: node 0 to all others, the others to node 0. All enter at the same time.

    Raises ValueError if a node does not know the `key` of node 0 or has other `settings`, and
    TimeoutError if a node is missing for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    others: dict[int, socket.socket] = {}
    try:
        if node.node_rank == 0:
            _accept_others(node, key, settings, deadline, others)
        else:
            others[0] = _join(node, key, settings, deadline)
        yield [*others.values()]
    finally:
        for connection in others.values():
            connection.close()


def await_end(process: subprocess.Popen[bytes], others: Sequence[socket.socket]) -> NoReturn:
    """Raise EngineError when `process` ends, or when the connection to another node breaks."""
    while (code := process.poll()) is None:
        if select.select(others, [], [], LOOK_SECONDS)[0]:  # they send nothing, so they have ended
            raise EngineError("another node of this engine has ended")
    raise EngineError(f"vLLM on this node of the engine ended with {exit_words(code)}")


def _accept_others(
    node: EngineNode, key: str, settings: str, deadline: float, joined: dict[int, socket.socket]
) -> None:
    """Put the connections to all other nodes into `joined`, and tell these when all are there."""
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
                joined[_greet(connection, node, key, settings)] = connection
            except (OSError, ValueError):  # not one of ours, or it has ended
                connection.close()
    for connection in joined.values():
        with suppress(OSError):  # it has ended, which `await_end` will see
            _say(connection, start=True)


def _listening(node: EngineNode) -> socket.socket:
    family = socket.getaddrinfo(node.master_addr, None, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((node.master_addr, node.master_port), family=family)
    except OSError as error:
        # The port may be taken only until what used it has ended.
        kind = EngineError if error.errno == errno.EADDRINUSE else ValueError
        raise kind(
            f"node 0 cannot listen at {node.meeting_point} ({error.strerror}): give an address of "
            "this host with --master-addr, and a free port with --master-port"
        ) from None


def _greet(connection: socket.socket, node: EngineNode, key: str, settings: str) -> int:
    """The rank of the node at the other end; raises OSError or ValueError if it is not ours."""
    connection.settimeout(ANSWER_SECONDS)
    challenge = secrets.token_hex(16)
    _say(connection, challenge=challenge)
    match _hear(connection):
        case {"node_rank": int(rank), "proof": str(given), "settings": str(theirs)}:
            pass
        case said:
            raise ValueError(f"no node of this engine: {said}")
    if not is_proof(given, key, challenge, rank):
        _say(connection, refused="it has another MEGATRON_GRPO_TOKEN")
        raise ValueError("another token")
    if theirs != settings or rank not in range(1, node.nnodes):
        _say(connection, refused=f"it was started for {settings}, and this node for {theirs}")
        raise ValueError("another engine")
    _keep_alive(connection)
    return rank


def _join(node: EngineNode, key: str, settings: str, deadline: float) -> socket.socket:
    """A connection to node 0, as soon as all nodes have joined."""
    while True:
        try:
            connection = socket.create_connection(
                (node.master_addr, node.master_port), ANSWER_SECONDS
            )
            try:
                return _introduced(connection, node, key, settings)
            except BaseException:
                connection.close()
                raise
        except OSError as error:  # not there yet, or there is something else
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"node 0 of this engine does not answer at {node.meeting_point} in time "
                    f"(rollout.startup_timeout): {error}"
                ) from None
            time.sleep(RETRY_SECONDS)


def _introduced(
    connection: socket.socket, node: EngineNode, key: str, settings: str
) -> socket.socket:
    """`connection`, when node 0 says that all are there; raises OSError if it is not node 0."""
    match _hear(connection):
        case {"challenge": str(challenge)}:
            answer = proof(key, challenge, node.node_rank)
        case said:
            raise ConnectionError(f"it says {said}")
    _say(connection, node_rank=node.node_rank, proof=answer, settings=settings)
    _keep_alive(connection)
    match _hear(connection):
        case {"refused": why}:
            raise ValueError(f"node 0 of this engine, at {node.meeting_point}: {why}")
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Let reads wait without limit, but only as long as the other node is there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _say(connection: socket.socket, **words: Any) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def _hear(connection: socket.socket) -> Any:
    with connection.makefile("rb", buffering=0) as file:
        heard = file.readline(MAX_LINE_BYTES)
    try:
        return json.loads(heard)
    except ValueError:
        raise ConnectionError("no answer of a node" if heard else "it hung up") from None
