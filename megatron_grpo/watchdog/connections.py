"""Both ends of the connections between the ranks and rank 0: lines of JSON over TCP.

A thread of each rank (`Heartbeat`) reports to a thread of rank 0 (`WatchdogServer`), which notifies
all ranks when the job is over. Sockets rather than keys in torch's TCPStore: the kernel closes a
dead rank's connection, so that its death is known in half a second. A client must begin with the
line `{"rank": r, "host": h, "pid": p, "proof": x}`, where x needs the job's token, and the server
answers with a proof of its own: the address is in a store where strangers may write.
"""

import asyncio
import faulthandler
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.process import EXIT_INTERRUPTED, PREEMPTION_SIGNALS
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE
from megatron_grpo.launch.sentinel import DUMP, Sentinel
from megatron_grpo.watchdog.job import EXIT_FAILURE, End, Failure, Intervals, Job, Limits, Position
from megatron_grpo.watchdog.stacks import main_stack
from parallel.addresses import listen_at
from parallel.clock import RunningLoop, run, running_time

POLL_SECONDS = 0.05
"""Interval of checks for a verdict."""
EXIT_SECONDS = 2.0
"""Time for the other ranks to exit after the verdict, and for stacks to be written."""
MAX_LINE_BYTES = 1 << 20
UNWIND = signal.SIGRTMIN
"""Interrupts rank 0's main thread. Not SIGINT, which processes started by `nohup` or a script's
`&` inherit as ignored."""
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class ServerAddress:
    """Address of the server on rank 0."""

    rank_0: str
    """Description of rank 0 in messages."""
    host: str
    port: int

    def proof(self, who: str, token: str) -> str:
        """Show that `who` has the token, at this address only: an impostor's is another."""
        text = f"{who} at {self.host} {self.port}"
        return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def encode_line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any] | str:
    """Decode a message; a line of a crash report, which is no JSON object, stays text."""
    text = line.decode(errors="replace").rstrip("\n")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return fields if isinstance(fields, dict) else text


class WatchdogServer:
    """Listens on exactly `host`; ranks with the same `token` connect to `address`."""

    def __init__(
        self,
        host: str,
        world_size: int,
        limits: Limits,
        stacks_file: Path,
        intervals: Intervals,
        token: str,
    ) -> None:
        self._listener = listen_at(host)
        self.address = ServerAddress(
            rank_0=f"rank 0 on {socket.gethostname()} (pid {os.getpid()})",
            host=host,
            port=self._listener.getsockname()[1],
        )
        self._world_size, self._intervals, self._stacks_file = world_size, intervals, stacks_file
        self._token = token
        self._job = Job(world_size, limits, intervals, running_time())
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        """The open connections."""
        self._is_preempted = False
        self._thread = threading.Thread(
            target=lambda: run(self._run()), name="watchdog-server", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.start_server(
            self._serve, sock=self._listener, limit=MAX_LINE_BYTES, backlog=self._world_size
        )
        last_heartbeat, sent = running_time(), self._job.position
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._job.wants_stacks(running_time()):
                self._broadcast(encode_line(request="stack"))
            if end := self._job.verdict(running_time()):
                return await self._finish(end)
            position = self._job.position
            # Phases at once: ranks name rank 0's phase if its connection breaks.
            is_due = running_time() - last_heartbeat >= self._intervals.heartbeat
            if position.phase != sent.phase or is_due:
                last_heartbeat, sent = running_time(), position
                self._broadcast(encode_line(heartbeat=asdict(position)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one client, until it has closed its connection."""
        rank = None
        # OSError: ETIMEDOUT when a host is gone, TimeoutError of a silent stranger. ValueError: a
        # line that is too long. TypeError: other fields. CancelledError: the job is over; older
        # releases of asyncio would log it.
        with suppress(OSError, ValueError, TypeError, asyncio.CancelledError):
            async with asyncio.timeout(self._intervals.silence):
                first = await reader.readline()
            rank = self._join(decode_line(first), writer)
            async for line in reader:
                self._handle(rank, decode_line(line))
        writer.close()
        if rank is not None:
            del self._ranks[rank]
            self._job.on_disconnect(rank, running_time())

    def _join(self, first: Any, writer: asyncio.StreamWriter) -> int:
        """Register a client by its first line, and return its rank; ValueError for a stranger."""
        match first:
            case {"rank": int(rank), "host": str(host), "pid": int(pid), "proof": str(proof)} if (
                0 <= rank < self._world_size and rank not in self._job.members
            ):
                if not hmac.compare_digest(proof, self.address.proof(f"rank {rank}", self._token)):
                    raise ValueError("another token")
                writer.write(self.address.proof("rank 0", self._token).encode())
                self._ranks[rank] = writer
                self._job.on_connect(rank, host, pid, running_time())
                if self._is_preempted:  # since before this rank joined
                    writer.write(encode_line(preempt=True))
                return rank
        raise ValueError("no rank of this job")

    def _handle(self, rank: int, message: Any) -> None:
        job, now = self._job, running_time()
        match message:
            case {"heartbeat": position}:
                job.on_heartbeat(rank, Position(**position), now, message.get("cpu", 0.0))
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
        for writer in self._ranks.values():
            writer.write(message)

    async def _finish(self, end: End) -> None:
        """Send the verdict to all ranks, and write the stacks."""
        # Rank 0 last: this thread ends with its process. Stacks are written in another thread: the
        # job may hang in the file system.
        message = encode_line(end={"code": end.code, "text": end.text})
        own = self._ranks.get(0)
        for writer in self._ranks.values():
            if writer is not own:
                writer.write(message)
        deadline = running_time() + EXIT_SECONDS
        stacks = threading.Thread(target=self._write, args=[end.stacks], daemon=True)
        stacks.start()
        while self._ranks.keys() - {0} and running_time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        stacks.join(max(0.0, deadline - running_time()))
        if own is not None:
            own.write(message)

    def _write(self, stacks: str) -> None:
        if not stacks:
            return
        with suppress(OSError):  # the verdict must reach the ranks all the same
            self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
            self._stacks_file.write_text(stacks, encoding="utf-8")


def connect(address: ServerAddress, rank: int, token: str, timeout: float) -> socket.socket:
    """Connect this process to the server as `rank`; OSError if that takes `timeout` seconds,
    ValueError if the server has another token."""
    with ExitStack() as unproved:
        connection = socket.create_connection((address.host, address.port), timeout)
        unproved.enter_context(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        connection.sendall(encode_line(**hello, proof=address.proof(f"rank {rank}", token)))
        expected = address.proof("rank 0", token).encode()
        if not hmac.compare_digest(connection.recv(len(expected)), expected):
            raise ValueError(
                f"rank {rank} on {socket.gethostname()} has another {TOKEN_VARIABLE} than "
                f"{address.rank_0} at {address.host} port {address.port}: set the same on all hosts"
            )
        unproved.pop_all()
    connection.settimeout(None)
    return connection


class Heartbeat:
    """Sends heartbeats with the main thread's `position()`, and its messages.

    `preempt` is called when any rank gets a preemption signal; `interrupted()` is the last line
    after Ctrl-C. Unless all ranks succeed, this thread ends the process when the job is over.
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
        self._signal_writer.setblocking(False)  # as `set_wakeup_fd` requires
        self.is_unwinding, self._is_unwound = threading.Event(), threading.Event()
        """`is_unwinding` is set once the main thread unwinds, and need not be interrupted."""
        # The main thread's CPU time alone: other threads may work while it hangs.
        self._main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._sentinel: Sentinel | None = None
        self._heard = running_time()
        """Time of rank 0's last message."""
        # faulthandler writes crash reports here. On rank 0 the server dies with the crash.
        self._crash_file = sys.stderr if place.rank == 0 else connection
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread and handle signals; call this from the main thread."""
        signal.signal(UNWIND, signal.default_int_handler)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Python handlers would wait for the main thread's collectives. The C handler writes each
        # signal's number to this socket at once, for the heartbeat thread.
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        faulthandler.enable(self._crash_file)
        # The sentinel sends DUMP if this thread cannot run because another thread holds the GIL.
        faulthandler.register(DUMP, self._crash_file)
        self._thread.start()

    def send(self, **fields: Any) -> None:
        self._loop.call_soon_threadsafe(self._writer.write, encode_line(**fields))

    def join(self) -> None:
        """Wait until all ranks have ended; call this after closing the main thread's resources."""
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
        # It dumps stacks before the server counts this rank as silent.
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
        # Rank 0 cannot print it any more, and one message is enough.
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
        # `sys.exit` would end this thread alone, and the main thread may be in a collective.
        os._exit(end.code)
