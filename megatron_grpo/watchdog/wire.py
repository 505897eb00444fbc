"""The protocol of ranks and monitor: lines of JSON, after a proof of knowing the key."""

import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from megatron_grpo.launch.key_proof import proof

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class MonitorAddress:
    """Where the monitor listens, and the secret key of the job."""

    rank_0: str
    """Description of rank 0, in which the monitor runs, for messages."""

    host: str
    port: int
    key: str


def new_key() -> str:
    """A random key of 256 bits."""
    return secrets.token_hex(32)


def line(**words: Any) -> bytes:
    """Encode a message."""
    return json.dumps(words).encode() + b"\n"


class LineReader:
    """Splits the data received from a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any] | str]:
        """The messages completed by `data`; other lines, such as crash reports, as text.

        Raises ValueError if a line exceeds MAX_LINE_BYTES.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError("a line without end")
        return [_parsed(text.decode(errors="replace")) for text in lines]


def _parsed(text: str) -> dict[str, Any] | str:
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return words if isinstance(words, dict) else text


def connect(
    address: MonitorAddress, rank: int, host: str, pid: int, timeout: float
) -> socket.socket:
    """Connect `rank` to the monitor and authenticate it.

    Raises OSError if the monitor cannot be reached within `timeout` seconds.
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
