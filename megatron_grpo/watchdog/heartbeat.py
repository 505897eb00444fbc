"""The thread of a rank that is connected to rank 0's server and ends the process."""

import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.process import EXIT_INTERRUPTED, PREEMPTION_SIGNALS
from megatron_grpo.launch.sentinel import DUMP, Sentinel
from megatron_grpo.watchdog.job import EXIT_FAILURE, End, Intervals, Position
from megatron_grpo.watchdog.server import MAX_LINE_BYTES, ServerAddress, encode_line
from megatron_grpo.watchdog.stacks import main_stack
from parallel.clock import RunningLoop, running_time

UNWIND = signal.SIGRTMIN
"""Interrupts rank 0's main thread. Not SIGINT, which processes started by `nohup` or a script's
`&` inherit as ignored."""
SHOW_CURSOR = "\x1b[?25h"


def connect(address: ServerAddress, rank: int, timeout: float) -> socket.socket:
    """Connect this process to the server as `rank`.

    Raises OSError if the server cannot be reached within `timeout` seconds.
    """
    connection = socket.create_connection((address.host, address.port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(encode_line(rank=rank, host=socket.gethostname(), pid=os.getpid()))
    connection.settimeout(None)
    return connection


class Heartbeat:
    """Sends heartbeats with the main thread's `position()`, and passes on its messages.

    `preempt` is called when any rank of the job was told to stop; `interrupted()` is what a job
    says that Ctrl-C ends. Unless all ranks succeed, this thread ends the process when the job is
    over.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank_0: str,
        place: RankPlace,
        intervals: Intervals,
        position: Callable[[], Position],
        preempt: Callable[[], None],
        interrupted: Callable[[], str],
    ) -> None:
        self._socket, self._place, self._intervals = connection, place, intervals
        self._position, self._preempt, self._interrupted = position, preempt, interrupted
        self._rank_0, self._rank_0_position = rank_0, Position()
        self._loop = RunningLoop()
        self._reader, self._writer = self._loop.run_until_complete(
            asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
        )
        self._signal_writer, self._signal_reader = socket.socketpair()
        self._signal_writer.setblocking(False)
        self.is_unwinding, self._is_unwound = threading.Event(), threading.Event()
        """The first: set once the main thread unwinds, and need not be interrupted."""
        self._main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._sentinel: Sentinel | None = None
        self._heard = running_time()
        """When rank 0 was heard."""
        # faulthandler writes crash reports here. On rank 0 the server dies with the crash.
        self._crash_file = sys.stderr if place.rank == 0 else connection
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread and handle signals; call this from the main thread.

        Python's C signal handler writes each signal's number to the wake-up socket, whatever the
        main thread is doing.
        """
        signal.signal(UNWIND, signal.default_int_handler)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        faulthandler.enable(self._crash_file)
        # What the sentinel asks for if this thread cannot run because another one holds the GIL.
        faulthandler.register(DUMP, self._crash_file)
        self._thread.start()

    def send(self, **fields: Any) -> None:
        """Send a message to the server; callable from any thread."""
        self._loop.call_soon_threadsafe(self._writer.write, encode_line(**fields))

    def join(self) -> None:
        """Wait until all ranks have ended; call this after closing what the main thread owns."""
        self.is_unwinding.set()
        self._is_unwound.set()
        self._thread.join()

    def close(self) -> None:
        """Close the connection, which a forked child would keep open, and reset signal handling."""
        signal.set_wakeup_fd(-1)
        signal.signal(UNWIND, signal.SIG_DFL)
        faulthandler.unregister(DUMP)
        if self._sentinel is not None:
            self._sentinel.close()
        self._socket.close()

    def _work(self) -> None:
        self._sentinel = Sentinel(0.75 * self._intervals.silence, self._intervals.kill)
        self._loop.run_until_complete(self._run())
        self._sentinel.end()

    async def _run(self) -> None:
        """Send heartbeats, and handle signals and messages, until all ranks have succeeded."""
        self._loop.add_reader(self._signal_reader, self._handle_signals)
        self._beat()
        with suppress(OSError):  # such as ETIMEDOUT when a host is gone
            async for line in self._reader:
                self._heard = running_time()
                if self._handle(json.loads(line)):
                    return
        self._exit_without_rank_0("died")

    def _beat(self) -> None:
        """Send heartbeats from now on."""
        if running_time() - self._heard >= self._intervals.silence:
            self._exit_without_rank_0(f"has not answered for {self._intervals.silence:g} s")
        cpu = time.clock_gettime(self._main_clock)
        self._writer.write(encode_line(heartbeat=asdict(self._position()), cpu=cpu))
        assert self._sentinel is not None
        self._sentinel.beat()
        self._loop.call_later(self._intervals.heartbeat, self._beat)

    def _handle_signals(self) -> None:
        numbers = self._signal_reader.recv(4096)
        if signal.SIGINT in numbers:
            end = End(EXIT_INTERRUPTED, f"megatron-grpo: {self._interrupted()}")
            self._writer.write(encode_line(stop=asdict(end)))
        if not set(PREEMPTION_SIGNALS).isdisjoint(numbers):
            self._writer.write(encode_line(preempt=True))

    def _handle(self, message: Any) -> bool:
        """Handle a message of the server; returns True when all ranks have succeeded."""
        match message:
            case {"end": {"code": 0}}:
                return True
            case {"end": end}:
                self._exit(End(**end))
            case {"request": "stack"}:
                self._writer.write(encode_line(stack=main_stack()))
            case {"preempt": True}:
                self._preempt()
            case {"heartbeat": position}:
                self._rank_0_position = Position(**position)
        return False

    def _exit_without_rank_0(self, how: str) -> NoReturn:
        text = f"megatron-grpo: {self._rank_0} {how} in {self._rank_0_position}"
        if self._place.rank == 1 and not self._place.has_own_log:
            print(text, file=sys.stderr, flush=True)
        self._exit(End(EXIT_FAILURE, text))

    def _exit(self, end: End) -> NoReturn:
        """Exit this process; rank 0 may first close its engines and files."""
        if self._place.rank == 0 or self._place.has_own_log:
            with suppress(OSError):  # a full disk, or a pipe that nobody reads any more
                print(end.text, file=sys.stderr, flush=True)
        if self._place.rank == 0:
            if not self.is_unwinding.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, UNWIND)
            self._is_unwound.wait(self._intervals.unwind)
            if sys.stdout.isatty():  # a progress bar may have hidden it
                print(SHOW_CURSOR, end="")
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(end.code)
