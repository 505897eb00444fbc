"""How the receiver of a link reaches the sender: the sender listens, the receiver shows the key."""

import hmac
import secrets
import socket
import time
from datetime import timedelta

from parallel.wire import LinkError, Wire

Address = str | tuple[str, int]
"""Name of an abstract Unix socket of this host, or host and port."""
STRANGER_SECONDS = 5.0
"""How long one that has connected may take to show the key."""


class Listener:
    """Waits for the one receiver that knows `key`.

    It listens on a free port of `host`, or, without one, inside this host under a name that no file
    system knows and nobody guesses.
    """

    def __init__(self, key: str, host: str | None = None) -> None:
        self._key = key.encode()
        self.address: Address
        if host is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self.address = f"weights-{secrets.token_hex(16)}"
            self._socket.bind(f"\0{self.address}")
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.socket(family)
            self._socket.bind((host, 0))
            self.address = (host, self._socket.getsockname()[1])
        self._socket.listen()

    def accept(self, peer: str, timeout: timedelta) -> Wire:
        """The connection of `peer`, after which nobody is waited for; others are closed.

        Raises LinkError when `peer` does not come within `timeout`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        with self._socket:
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    break
                if self._knows_key(connection, min(left, STRANGER_SECONDS)):
                    return Wire(_prompt(connection), peer, timeout)
                connection.close()
        raise LinkError(f"{peer} did not connect within {timeout.total_seconds():g} s")

    def close(self) -> None:
        """Wait for nobody."""
        self._socket.close()

    def _knows_key(self, connection: socket.socket, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        said = b""
        while len(said) < len(self._key) and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                part = connection.recv(len(self._key) - len(said))
            except OSError:
                return False
            if not part:
                return False
            said += part
        return hmac.compare_digest(said, self._key)


def connect(address: Address, key: str, peer: str, timeout: timedelta) -> Wire:
    """A connection to the listener of `peer`; LinkError when there is none."""
    try:
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"\0{address}")
        else:
            host, port = address
            connection = socket.create_connection((host, port), timeout.total_seconds())
    except OSError as error:
        raise LinkError(f"{peer} does not listen for its link: {error}") from error
    wire = Wire(_prompt(connection), peer, timeout)
    wire.send(memoryview(key.encode()))
    return wire


def _prompt(connection: socket.socket) -> socket.socket:
    """Let words of a byte not wait for more."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
