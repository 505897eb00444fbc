"""The thread on rank 0 that listens to all ranks and tells them when the job is over.

A kernel timer is the last resort against a process that neither runs nor ends.
"""

import ctypes
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_grpo.launch.key_proof import is_proof
from megatron_grpo.watchdog.job import End, Failure, Job, Limits, Pace, Position
from megatron_grpo.watchdog.wire import LineReader, MonitorAddress, line, new_key

LOOK_SECONDS = 0.05
"""Polling interval: messages of a thousand ranks must not wake the thread one by one."""
LAST_WORDS_SECONDS = 2.0
"""Time for the other ranks to leave after being told, and for stacks to be written."""


class _Connection:
    """A connection from a rank, which is unknown as long as `rank` is None."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = accepted
        self.rank: int | None = None
        self.challenge = secrets.token_hex(16)
        self.lines = LineReader()
        self._unsent = b""

    def send(self, data: bytes = b"") -> None:
        """Send what the kernel accepts now, and the rest with the next message."""
        self._unsent += data
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except OSError:
            return  # stopped or gone: other code decides what that means


class Monitor:
    """Listens on exactly `host`; ranks connect with `address`.

    Connections without the key are refused, and messages are plain JSON data.
    """

    def __init__(
        self, host: str, world_size: int, limits: Limits, stacks_file: Path, pace: Pace
    ) -> None:
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = MonitorAddress(
            rank_0=f"rank 0 on {socket.gethostname()} (pid {os.getpid()})",
            host=host,
            port=port,
            key=new_key(),
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._pace, self._stacks_file = pace, stacks_file
        # Counts time only while this thread runs: a suspended machine has not been silent.
        self._now, self._looked = 0.0, time.monotonic()
        self._job = Job(world_size, limits, pace, self._now)
        self._is_preempted = False
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all ranks have been told that the job is over."""
        self._thread.join()

    def _run(self) -> None:
        last_beat, told = self._now, self._job.position
        while True:
            self._look()
            if self._job.wants_stacks(self._now):
                self._tell(line(tell="stack"))
            if end := self._job.end(self._now):
                return self._finish(end)
            position = self._job.position
            if position.phase != told.phase or self._now - last_beat >= self._pace.beat:
                last_beat, told = self._now, position
                self._tell(line(beat=asdict(position)))

    def _look(self) -> None:
        """Wait for the polling interval, then handle all new messages."""
        time.sleep(LOOK_SECONDS)
        looked = time.monotonic()
        self._now += min(looked - self._looked, self._pace.beat)
        self._looked = looked
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._receive(key.data)

    def _accept(self) -> None:
        with suppress(
            BlockingIOError, ConnectionAbortedError
        ):  # no more connections, or one that is gone again
            while True:
                accepted, _ = self._listener.accept()
                connection = _Connection(accepted)
                self._connections.add(connection)
                self._selector.register(accepted, selectors.EVENT_READ, connection)
                connection.send(line(challenge=connection.challenge))

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            for message in connection.lines.feed(data):
                self._take(connection, message)
        except (OSError, ValueError):  # such as ETIMEDOUT when a host is gone
            data = b""
        if not data:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)
        if connection.rank is not None:
            self._job.lost(connection.rank, self._now)

    def _take(self, connection: _Connection, message: Any) -> None:
        rank, job, now = connection.rank, self._job, self._now
        match message:
            case {"rank": int(claimed), "host": host, "pid": pid, "proof": str(given)}:
                if not is_proof(given, self.address.key, connection.challenge, claimed):
                    raise ConnectionError("no rank of this job")
                connection.rank = claimed
                job.join(claimed, host, pid, now)
                if self._is_preempted:  # since before this rank joined
                    connection.send(line(preempt=True))
            case _ if rank is None:
                raise ConnectionError("no rank of this job")
            case {"beat": position}:
                job.beat(rank, Position(**position), now)
            case {"failure": failure}:
                job.failed(rank, Failure(**failure), now)
            case {"stack": stack}:
                job.members[rank].stack = stack
            case {"leaves": end}:
                job.leaves(rank, End(**end), now)
            case {"over": end}:
                job.over(End(**end), now)
            case {"preempt": True}:
                self._is_preempted = True
                self._tell(line(preempt=True))
            case str(text):  # what faulthandler wrote at a crash
                job.members[rank].dump.append(text)

    def _tell(self, message: bytes) -> None:
        for connection in self._connections:
            if connection.rank is not None:
                connection.send(message)

    def _finish(self, end: End) -> None:
        """Tell the other ranks first, since this thread ends with rank 0.

        Stacks are written in a separate thread: the job may hang in the file system.
        """
        message = line(end={"code": end.code, "text": end.text})
        own = {connection for connection in self._connections if connection.rank == 0}
        others = self._connections.difference(own)
        for connection in others:
            connection.send(message)
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        writer = threading.Thread(target=self._write, args=[end.stacks], daemon=True)
        writer.start()
        while self._connections.difference(own) and time.monotonic() < deadline:
            for connection in others & self._connections:
                connection.send()
            self._look()
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


class _SigEvent(ctypes.Structure):
    """`struct sigevent` of 64-bit Linux."""

    _fields_ = (
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("padding", ctypes.c_byte * 48),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds."""

    _fields_ = (("it_interval", ctypes.c_long * 2), ("it_value", ctypes.c_long * 2))


class KillTimer:
    """Makes Linux SIGKILL this process some seconds after the last `wind`.

    This ends processes that cannot end by themselves: one that is stopped (SIGSTOP), or one in
    which C code never releases the GIL. Children do not inherit the timer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._libc = ctypes.CDLL(None, use_errno=True)
        event = _SigEvent(sigev_signo=signal.SIGKILL, sigev_notify=SIGEV_SIGNAL)
        self._timer = ctypes.c_void_p()
        failed = self._libc.timer_create(
            CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )
        assert not failed, f"timer_create: errno {ctypes.get_errno()}"

    def wind(self) -> None:
        """Restart the timer."""
        self._set(self._seconds)

    def stop(self) -> None:
        """Disarm the timer."""
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        whole = int(seconds)
        spec = _TimerSpec(it_value=(whole, int((seconds - whole) * 1e9)))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)
