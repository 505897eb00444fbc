"""The interface of channels, independent of how bytes are moved, and their control sockets.

A channel goes from one sending process to one receiving process. It has two buffers: while one is
transferred or read, the other is filled. Each end is used by one thread at a time. Both ends take
turns by signals over a control socket, where the sender listens, and the receiver connects and
proves that it has their secret; the socket also shows each end the loss of the other.
"""

import hmac
import json
import secrets
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from selectors import EVENT_READ, DefaultSelector
from typing import Protocol

import torch
from torch import Tensor

from parallel.clock import running_time, stopped_time

NUM_SLOTS = 2
"""Number of buffers of a channel."""


class Channel(Protocol):
    """One end of a channel. Waits raise ChannelError if the other end is closed, dead or
    unresponsive."""

    def next_buffer(self) -> Tensor:
        """Sender: the buffer to fill next, uint8 [bucket_bytes], once its contents are sent."""

    def send_bucket(self, num_bytes: int) -> None:
        """Sender: send the first `num_bytes` of the buffer just filled."""

    def flush(self) -> None:
        """Sender: wait until the receiver is done with everything that was sent."""

    def receive_buckets(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Receiver: the next ``len(sizes)`` buffers, each as its first ``sizes[i]`` bytes, uint8.

        A buffer is valid until the next one is requested. Exhaust the iterator: that tells the
        sender that the last buffer has been read.
        """

    def abort(self) -> None:
        """Make the waits of both ends fail; any thread may call it."""

    def close(self) -> None:
        """End the channel and free its buffers; the other end's waits fail at once."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work.

    Do not call this while a channel moves bytes: it would also wait for transfers whose peer is
    lost.
    """
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's copies in their own stream, if on a GPU; call `synchronize` first.

    Also selects the device: a new thread starts on GPU 0, where restoring its stream would create a
    context of half a gigabyte.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def finish_copies(device: torch.device) -> None:
    """Wait until the copies that this thread started are complete."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


Address = str | tuple[str, int]
"""Name of an abstract Unix socket on this host, or host and port."""
CHECK_SECONDS = 0.2
END_SECONDS = 1.0
SIGNAL = b"\1"
"""The byte of a signal; both ends know from the protocol what it means at each point."""


class ChannelError(ConnectionError):
    """The other end of a channel, named in the message, closed it, died, or stopped responding."""


class ChannelSet:
    """The open channels of a process."""

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._is_closed = False

    def open_all(self, calls: Sequence[Callable[[], Channel]]) -> list[Channel]:
        """Add the channels that `calls` open, all at the same time; returns them."""

        def add(call: Callable[[], Channel]) -> Channel:
            channel = call()
            self._channels.append(channel)
            return channel

        return self.run_all([partial(add, call) for call in calls])

    def run_all[T](self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of `jobs` in its own thread; returns their results.

        When one fails, aborts the others, closes all channels, and raises the first error.
        """
        if self._is_closed:
            raise ChannelError("the channels were closed, by a failure or by this process")
        future: Future[T] | None = None
        with ThreadPoolExecutor(max_workers=len(jobs) or 1) as pool:
            futures = [pool.submit(job) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:  # also the user's interrupt
                # A copy, because jobs of `open_all` may still add to the list.
                for channel in [*self._channels]:
                    channel.abort()
                wait(futures)
                # The error's traceback references this frame and the channels' buffers. A cycle
                # would keep these allocated until the next garbage collection.
                del futures, future
                with suppress(Exception):  # the first failure says more
                    self.close()
                raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close all channels, even if closing one fails; call it while no job is running."""
        if not self._is_closed:
            self._is_closed = True
            # The stack closes all, even after an error, last in first out; reversed, oldest first.
            with ExitStack() as stack:
                for channel in reversed(self._channels):
                    stack.callback(channel.close)


class ControlSocket:
    """A connection to `peer`; every error names the peer.

    A wait fails after `timeout` without progress, and at once when the other end is closed or its
    process has ended.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: timedelta) -> None:
        self.socket, self.peer, self.seconds = connection, peer, timeout.total_seconds()
        self.is_local = connection.family == socket.AF_UNIX
        """Whether both ends are on this host."""
        connection.settimeout(self.seconds)
        if not self.is_local:  # send signals at once, without Nagle's algorithm
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # RDHUP as well: `send` must notice that the peer has closed while the buffer is full.
        self._sending = select.poll()
        self._sending.register(connection, select.POLLOUT | select.POLLRDHUP)
        self._hanging_up = select.poll()
        self._hanging_up.register(connection, select.POLLRDHUP)

    def send_signal(self) -> None:
        self.send(memoryview(SIGNAL))

    def await_signal(self) -> None:
        self.receive(memoryview(bytearray(len(SIGNAL))))

    def send(self, data: memoryview) -> None:
        stopped = stopped_time()
        while data:
            # A plain `send` would block on the full buffer of an end that has stopped reading.
            events = self._sending.poll(self.seconds * 1000)
            if not events:
                stopped = self._check_time(stopped)
                continue
            if events[0][1] & ~select.POLLOUT:
                raise self.closed()
            try:
                data = data[self.socket.send(data) :]
            except OSError as error:
                raise self.closed() from error

    def receive(self, data: memoryview) -> None:
        stopped = stopped_time()
        while data:
            try:
                count = self.socket.recv_into(data)
            except TimeoutError:
                stopped = self._check_time(stopped)
                continue
            except OSError as error:
                raise self.closed() from error
            if not count:
                raise self.closed()
            data = data[count:]

    def _check_time(self, stopped: float) -> float:
        """Raise after a wait that timed out; return `stopped_time` if this process was stopped."""
        if (now := stopped_time()) > stopped:
            return now
        raise self.timed_out()

    def is_open(self) -> bool:
        return not self._hanging_up.poll(0)

    def abort(self) -> None:
        """Make the waits of both ends fail; any thread may call it."""
        # Not close, which would not wake a thread that waits in `recv`.
        with suppress(OSError):  # the other end has closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def await_end(self) -> None:
        """Signal that this end is done, and wait at most END_SECONDS until the other has closed."""
        with suppress(OSError):  # the other end is gone, or too slow
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(END_SECONDS)
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        self.abort()
        self.socket.close()

    def closed(self) -> ChannelError:
        return ChannelError(f"{self.peer} has closed the channel or died")

    def timed_out(self) -> ChannelError:
        return ChannelError(f"{self.peer} has made no progress for {self.seconds:g} s")


class Listener:
    """Waits for the one receiver of a channel, which has the same `secret`.

    Listens on a free port of `host`; without `host`, on an abstract Unix socket with a random name.
    """

    def __init__(self, host: str | None = None, secret: str = "") -> None:
        self.address: Address = f"weights-{secrets.token_hex(16)}" if host is None else (host, 0)
        self._socket = _socket_for(self.address)
        self._socket.bind(_kernel_address(self.address))
        if host is not None:
            self.address = (host, self._socket.getsockname()[1])
        self._proof = _proof(secret, self.address)
        self._socket.listen()

    def accept(
        self, peer: str, timeout: timedelta, check: Callable[[], None] = lambda: None
    ) -> ControlSocket:
        """Wait for the connection of `peer`, then stop listening.

        Calls `check` every CHECK_SECONDS, which may raise. Raises ChannelError if `peer` does not
        connect within `timeout`.
        """
        deadline = running_time() + timeout.total_seconds()
        with self._socket, DefaultSelector() as selector, ExitStack() as stack:
            selector.register(self._socket, EVENT_READ, self._socket)
            while (left := deadline - running_time()) > 0:
                events = selector.select(min(left, CHECK_SECONDS))
                if not events:
                    check()
                for caller in [key.data for key, _ in events]:
                    if caller is self._socket:
                        # Not heard at once: a stranger may be first, and say nothing.
                        connection, _ = self._socket.accept()
                        stack.callback(connection.close)
                        selector.register(connection, EVENT_READ, connection)
                    elif self._is_proved(caller):
                        return ControlSocket(caller.dup(), peer, timeout)  # the stack closes caller
                    else:
                        selector.unregister(caller)
                        caller.close()
        raise ChannelError(f"{peer} did not connect within {timeout.total_seconds():g} s")

    def _is_proved(self, caller: socket.socket) -> bool:
        """Whether a connection that can be read begins with the proof, which fits in a segment."""
        try:
            return hmac.compare_digest(caller.recv(len(self._proof)), self._proof)
        except OSError:  # reset
            return False

    def close(self) -> None:
        self._socket.close()


def _proof(secret: str, address: Address) -> bytes:
    """Show that the receiver has the secret, at this address only: an impostor's is another."""
    return hmac.digest(secret.encode(), json.dumps(address).encode(), "sha256")


def connect(address: Address, peer: str, timeout: timedelta, secret: str = "") -> ControlSocket:
    """Connect to the listener of `peer`, with its `secret`; ChannelError if it does not listen."""
    connection = _socket_for(address)
    try:
        connection.settimeout(timeout.total_seconds())
        connection.connect(_kernel_address(address))
        connection.sendall(_proof(secret, address))
    except OSError as error:
        connection.close()
        raise ChannelError(f"cannot connect to {peer}: {error}") from error
    return ControlSocket(connection, peer, timeout)


def _socket_for(address: Address) -> socket.socket:
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX)
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)


def _kernel_address(address: Address) -> str | tuple[str, int]:
    """`address` as the kernel takes it: a zero byte makes a name abstract."""
    # A new tuple: an address from JSON is a list.
    return f"\0{address}" if isinstance(address, str) else (address[0], address[1])
