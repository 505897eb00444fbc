"""The thread on rank 0 that hears from all ranks and tells them when the job is over.

It speaks lines of JSON over TCP. Sockets rather than keys in torch's TCPStore, because the kernel
closes a dead rank's connection: the death is known in half a second, where a key would only cease
to change. As in the rest of the job, the network is trusted; a client whose first line is not
`{"rank": r, "host": h, "pid": p}` is hung up on.

A kernel timer is the last resort against a process that neither runs nor ends.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.watchdog.job import End, Failure, Intervals, Job, Limits, Position

POLL_SECONDS = 0.05
"""Polling interval: messages of a thousand ranks must not wake the thread one by one."""
EXIT_SECONDS = 2.0
"""Time for the other ranks to exit after being told, and for stacks to be written."""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerAddress:
    """Where the server listens."""

    rank_0: str
    """Description of rank 0, in which the server runs, for messages."""
    host: str
    port: int


def encode_line(**fields: Any) -> bytes:
    """A message: one line of JSON."""
    return json.dumps(fields).encode() + b"\n"


class LineReader:
    """Splits the bytes received from a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any] | str]:
        """The messages completed by `data`; lines that are no JSON objects (crash reports) as text.

        Raises ValueError if a line exceeds MAX_LINE_BYTES.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return [_decode_line(text.decode(errors="replace")) for text in lines]


def _decode_line(text: str) -> dict[str, Any] | str:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return fields if isinstance(fields, dict) else text


class _Connection:
    """A client; `rank` is None until its first line."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = accepted
        self.rank: int | None = None
        self.lines = LineReader()
        self._unsent = b""

    def send(self, data: bytes = b"") -> None:
        """Send what the kernel accepts now, and the rest with the next message."""
        self._unsent += data
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except OSError:
            return  # stopped or gone: other code decides what that means


class WatchdogServer:
    """Listens on exactly `host`; ranks connect to `address`."""

    def __init__(
        self, host: str, world_size: int, limits: Limits, stacks_file: Path, intervals: Intervals
    ) -> None:
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self._listener.setblocking(False)
        self.address = ServerAddress(
            rank_0=f"rank 0 on {socket.gethostname()} (pid {os.getpid()})",
            host=host,
            port=self._listener.getsockname()[1],
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._world_size, self._intervals, self._stacks_file = world_size, intervals, stacks_file
        # Counts time only while this thread runs: a suspended machine has not been silent.
        self._now, self._polled = 0.0, time.monotonic()
        self._job = Job(world_size, limits, intervals, self._now)
        self._is_preempted = False
        self._thread = threading.Thread(target=self._run, name="watchdog-server", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all ranks have been told that the job is over."""
        self._thread.join()

    def _run(self) -> None:
        last_heartbeat, sent = self._now, self._job.position
        while True:
            self._poll()
            if self._job.wants_stacks(self._now):
                self._broadcast(encode_line(request="stack"))
            if end := self._job.verdict(self._now):
                return self._finish(end)
            position = self._job.position
            is_due = self._now - last_heartbeat >= self._intervals.heartbeat
            if position.phase != sent.phase or is_due:
                last_heartbeat, sent = self._now, position
                self._broadcast(encode_line(heartbeat=asdict(position)))

    def _poll(self) -> None:
        """Sleep for the polling interval, then handle all new messages."""
        time.sleep(POLL_SECONDS)
        polled = time.monotonic()
        self._now += min(polled - self._polled, self._intervals.heartbeat)
        self._polled = polled
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._receive(key.data)

    def _accept(self) -> None:
        # Raised when there are no more connections, or by one that is closed again.
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                accepted, _ = self._listener.accept()
                connection = _Connection(accepted)
                self._connections.add(connection)
                self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            for message in connection.lines.feed(data):
                if connection.rank is None:
                    self._join(connection, message)
                else:
                    self._handle(connection.rank, message)
        # Such as ETIMEDOUT when a host is gone, or a message with other fields.
        except (OSError, ValueError, TypeError):
            data = b""
        if not data:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)
        if connection.rank is not None:
            self._job.on_disconnect(connection.rank, self._now)

    def _join(self, connection: _Connection, message: Any) -> None:
        """Take the first line of a client; raises ValueError if it is no rank of this job."""
        match message:
            case {"rank": int(rank), "host": str(host), "pid": int(pid)} if (
                0 <= rank < self._world_size and rank not in self._job.members
            ):
                connection.rank = rank
                self._job.on_connect(rank, host, pid, self._now)
                if self._is_preempted:  # since before this rank joined
                    connection.send(encode_line(preempt=True))
            case _:
                raise ValueError("no rank of this job")

    def _handle(self, rank: int, message: Any) -> None:
        job, now = self._job, self._now
        match message:
            case {"heartbeat": position}:
                job.on_heartbeat(rank, Position(**position), now)
            case {"failure": failure}:
                job.on_exception(rank, Failure(**failure), now)
            case {"stack": stack}:
                job.members[rank].stack = stack
            case {"finished": end}:
                job.on_finish(rank, End(**end), now)
            case {"stop": end}:
                job.on_stop(End(**end), now)
            case {"preempt": True}:
                self._is_preempted = True
                self._broadcast(encode_line(preempt=True))
            case str(text):  # a line of faulthandler
                job.members[rank].dump.append(text)

    def _broadcast(self, message: bytes) -> None:
        for connection in self._connections:
            if connection.rank is not None:
                connection.send(message)

    def _finish(self, end: End) -> None:
        """Tell the other ranks first, since this thread ends with rank 0's process.

        Stacks are written in a separate thread: the job may hang in the file system.
        """
        message = encode_line(end={"code": end.code, "text": end.text})
        own = {connection for connection in self._connections if connection.rank == 0}
        others = self._connections.difference(own)
        for connection in others:
            connection.send(message)
        deadline = time.monotonic() + EXIT_SECONDS
        writer = threading.Thread(target=self._write, args=[end.stacks], daemon=True)
        writer.start()
        while self._connections.difference(own) and time.monotonic() < deadline:
            for connection in others & self._connections:
                connection.send()
            self._poll()
        writer.join(max(0.0, deadline - time.monotonic()))
        for connection in own & self._connections:
            connection.send(message)

    def _write(self, stacks: str) -> None:
        if not stacks:
            return
        with suppress(OSError):  # the verdict must reach the ranks all the same
            self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
            self._stacks_file.write_text(stacks)


CLOCK_MONOTONIC = 1
SIGEV_SIGNAL = 0


class KillTimer:
    """Makes Linux SIGKILL this process `seconds` after the last `restart`.

    This ends processes that cannot end by themselves: one that is stopped (SIGSTOP), or one in
    which C code never releases the GIL. Children do not inherit the timer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._libc = ctypes.CDLL(None, use_errno=True)
        # struct sigevent of 64-bit Linux: sigev_value, sigev_signo, sigev_notify, 48 unused bytes.
        event = struct.pack("Pii48x", 0, signal.SIGKILL, SIGEV_SIGNAL)
        self._timer = ctypes.c_void_p()
        failed = self._libc.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(self._timer))
        assert not failed, f"timer_create: errno {ctypes.get_errno()}"

    def restart(self) -> None:
        """Arm the timer anew; before the first call it is disarmed."""
        self._set(self._seconds)

    def stop(self) -> None:
        """Disarm the timer."""
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        whole = int(seconds)
        # struct itimerspec: no interval, then seconds and nanoseconds from now.
        spec = struct.pack("llll", 0, 0, whole, int((seconds - whole) * 1e9))
        self._libc.timer_settime(self._timer, 0, spec, None)
