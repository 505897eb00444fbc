"""Connects the two ends of a link: the sender listens, and the receiver sends the key."""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import cast

from parallel.weight_transfer.wire import LinkError, Wire

Address = str | tuple[str, int]
"""Name of an abstract Unix socket on this host, or host and port."""
MAX_STRANGERS = 64
"""Maximum connections that have not sent the key yet; beyond it, the oldest is closed."""
CHECK_SECONDS = 0.2
_CREDENTIALS = struct.Struct("iII")  # process, user and group of the other end


class Listener:
    """Waits for the one receiver that knows `key`.

    Listens on a free port of `host`; without `host`, on an abstract Unix socket with a random name.
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

    def accept(
        self, peer: str, timeout: timedelta, check: Callable[[], None] = lambda: None
    ) -> Wire:
        """Wait for the connection of `peer`, then stop listening and close all other connections.

        Raises LinkError if `peer` does not connect within `timeout`, and whatever `check` raises,
        which is called regularly while waiting.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        said: dict[socket.socket, bytes] = {}
        with self._socket:
            try:
                while (left := deadline - time.monotonic()) > 0:
                    ready = wait([self._socket, *said], min(left, CHECK_SECONDS))
                    if not ready:
                        check()
                    for connection in cast(list[socket.socket], ready):
                        if connection is self._socket:
                            self._welcome(said)
                        elif self._knows_key(connection, said):
                            del said[connection]
                            return Wire(_prompt(connection), peer, timeout)
            finally:
                for stranger in said:
                    stranger.close()
        raise LinkError(f"{peer} did not connect within {timeout.total_seconds():g} s")

    def close(self) -> None:
        """Stop listening; connections that were not accepted are closed."""
        self._socket.close()

    def _welcome(self, said: dict[socket.socket, bytes]) -> None:
        """Accept one more connection, which may then send the key."""
        connection, _ = self._socket.accept()
        if connection.family == socket.AF_UNIX and not _is_our_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        said[connection] = b""
        if len(said) > MAX_STRANGERS:
            longest = next(iter(said))
            del said[longest]
            longest.close()

    def _knows_key(self, connection: socket.socket, said: dict[socket.socket, bytes]) -> bool:
        """Whether a connection has now sent the whole key; a wrong one closes the connection."""
        if connection not in said:  # closed to make room for another
            return False
        try:
            part = connection.recv(len(self._key) - len(said[connection]))
        except OSError:
            part = b""
        said[connection] += part
        if hmac.compare_digest(said[connection], self._key):
            return True
        if not part or len(said[connection]) == len(self._key):
            del said[connection]
            connection.close()
        return False


def _is_our_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket belongs to this process's user or to root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (os.getuid(), 0)


def connect(address: Address, key: str, peer: str, timeout: timedelta) -> Wire:
    """Connect to the listener of `peer`; LinkError if it does not listen."""
    try:
        if isinstance(address, str):
            connection = _connect_inside(address, timeout)
        else:
            host, port = address
            connection = socket.create_connection((host, port), timeout.total_seconds())
    except OSError as error:
        raise LinkError(f"cannot connect to {peer}: {error}") from error
    wire = Wire(_prompt(connection), peer, timeout)
    try:
        wire.send(memoryview(key.encode()))
    except LinkError:
        wire.close()
        raise
    return wire


def _connect_inside(address: str, timeout: timedelta) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout.total_seconds())
        connection.connect(f"\0{address}")
    except OSError:
        connection.close()
        raise
    return connection


def _prompt(connection: socket.socket) -> socket.socket:
    """Disable Nagle's algorithm, so that single-byte words are sent at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
