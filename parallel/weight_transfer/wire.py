"""A socket between the two ends of a link: bytes, one-byte words, and failure detection."""

import select
import socket
from contextlib import suppress
from datetime import timedelta

WORD = b"\1"
"""Both ends know from the protocol what a word means at each point."""


class LinkError(ConnectionError):
    """The other end of a link, named in the message, closed it, died, or stopped responding."""


class Wire:
    """A connection to `peer`, which every error names.

    A wait fails after `timeout` without progress, and at once when the other end is closed or its
    process has ended.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: timedelta) -> None:
        self.socket = connection
        self.peer = peer
        self.seconds = timeout.total_seconds()
        connection.settimeout(self.seconds)
        self._sending = select.poll()
        self._sending.register(connection, select.POLLOUT | select.POLLRDHUP)
        self._hanging_up = select.poll()
        self._hanging_up.register(connection, select.POLLRDHUP)

    def say(self) -> None:
        """Send a word."""
        self.send(memoryview(WORD))

    def hear(self) -> None:
        """Wait for a word."""
        self.receive(memoryview(bytearray(len(WORD))))

    def send(self, data: memoryview) -> None:
        """Send all of `data`."""
        while data:
            # A plain `send` would block on the full buffer of an end that has stopped reading.
            events = self._sending.poll(self.seconds * 1000)
            if not events:
                raise self.mute()
            if events[0][1] & ~select.POLLOUT:
                raise self.closed()
            try:
                data = data[self.socket.send(data) :]
            except OSError as error:
                raise self.closed() from error

    def receive(self, data: memoryview) -> None:
        """Fill all of `data`."""
        while data:
            try:
                count = self.socket.recv_into(data)
            except TimeoutError as error:
                raise self.mute() from error
            except OSError as error:
                raise self.closed() from error
            if not count:
                raise self.closed()
            data = data[count:]

    def is_open(self) -> bool:
        """Whether neither end has closed the connection."""
        return not self._hanging_up.poll(0)

    def abort(self) -> None:
        """Make the waits of both ends fail; any thread may call it."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def await_end(self, seconds: float) -> None:
        """Signal that this end is done, and wait until the other has closed, at most `seconds`."""
        with suppress(OSError):  # the other end is gone, or takes its time
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(seconds)
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        """End the connection."""
        self.abort()
        self.socket.close()

    def closed(self) -> LinkError:
        """What to raise when the connection has ended."""
        return LinkError(f"{self.peer} has closed the link or died")

    def mute(self) -> LinkError:
        """What to raise when a wait has taken too long."""
        return LinkError(f"{self.peer} has made no progress for {self.seconds:g} s")
