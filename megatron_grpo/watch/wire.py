"""What ranks and monitor say to each other: lines of JSON, after a proof that one has the key."""

import hashlib
import hmac
import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class MonitorAddress:
    """Where the monitor listens, and the key that only ranks of the job know."""

    rank_0: str
    """The rank whose thread it is, as people should read it."""

    host: str
    port: int
    key: str


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_hex(32)


def proof(key: str, challenge: str, rank: int) -> str:
    """What only one who has the key can answer to a challenge."""
    return hmac.new(key.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


def line(**words: Any) -> bytes:
    """A message."""
    return json.dumps(words).encode() + b"\n"


class LineReader:
    """Cuts what arrives at a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any] | str]:
        """The messages that `data` completes; as text what is none, such as a crash report.

        Raises ValueError for a line without end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError("a line without end")
        return [_parsed(text.decode(errors="replace")) for text in lines]


def _parsed(text: str) -> dict[str, Any] | str:
    try:
        words = json.loads(text)
    except ValueError:
        return text
    return words if isinstance(words, dict) else text


def connect(
    address: MonitorAddress, rank: int, host: str, pid: int, timeout: float
) -> socket.socket:
    """The connection of `rank` to the monitor, which knows it from then on.

    Raises OSError where that cannot be reached in `timeout` seconds.
    """
    connection = socket.create_connection((address.host, address.port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection.makefile("rb", buffering=0) as file:
        asked = file.readline()
    if not asked:
        raise ConnectionError("the monitor on rank 0 hung up")
    answer = proof(address.key, json.loads(asked)["challenge"], rank)
    connection.sendall(line(rank=rank, host=host, pid=pid, proof=answer))
    connection.settimeout(None)
    return connection
