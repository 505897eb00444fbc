"""The thread on rank 0 that hears from all ranks and tells them when the job is over.

It speaks lines of JSON over TCP. Sockets rather than keys in torch's TCPStore, because the kernel
closes a dead rank's connection: the death is known in half a second, where a key would only cease
to change. As in the rest of the job, the network is trusted; a client whose first line is not
`{"rank": r, "host": h, "pid": p}` is hung up on.
"""

import asyncio
import json
import os
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.watchdog.job import End, Failure, Intervals, Job, Limits, Position
from parallel.clock import run, running_time

POLL_SECONDS = 0.05
"""Interval at which the verdict is looked for."""
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


def decode_line(line: bytes) -> dict[str, Any] | str:
    """A message; a line that is no JSON object (of a crash report) as text."""
    text = line.decode(errors="replace").rstrip("\n")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return fields if isinstance(fields, dict) else text


class WatchdogServer:
    """Listens on exactly `host`; ranks connect to `address`."""

    def __init__(
        self, host: str, world_size: int, limits: Limits, stacks_file: Path, intervals: Intervals
    ) -> None:
        self._listener = socket.create_server((host, 0))
        self.address = ServerAddress(
            rank_0=f"rank 0 on {socket.gethostname()} (pid {os.getpid()})",
            host=host,
            port=self._listener.getsockname()[1],
        )
        self._world_size, self._intervals, self._stacks_file = world_size, intervals, stacks_file
        self._job = Job(world_size, limits, intervals, running_time())
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        """The open connections."""
        self._is_preempted = False
        self._thread = threading.Thread(
            target=lambda: run(self._run()), name="watchdog-server", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until all ranks have been told that the job is over."""
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
            is_due = running_time() - last_heartbeat >= self._intervals.heartbeat
            if position.phase != sent.phase or is_due:
                last_heartbeat, sent = running_time(), position
                self._broadcast(encode_line(heartbeat=asdict(position)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one client, until it has closed its connection."""
        rank = None
        # Such as ETIMEDOUT when a host is gone, a line that is too long, or other fields. It is
        # cancelled when the job is over, which older releases of asyncio would log.
        with suppress(OSError, ValueError, TypeError, asyncio.CancelledError):
            rank = self._join(decode_line(await reader.readline()), writer)
            async for line in reader:
                self._handle(rank, decode_line(line))
        writer.close()
        if rank is not None:
            del self._ranks[rank]
            self._job.on_disconnect(rank, running_time())

    def _join(self, first: Any, writer: asyncio.StreamWriter) -> int:
        """The rank of a client by its first line; raises ValueError if it is none of this job."""
        match first:
            case {"rank": int(rank), "host": str(host), "pid": int(pid)} if (
                0 <= rank < self._world_size and rank not in self._job.members
            ):
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
        """Tell the other ranks first, since this thread ends with rank 0's process.

        Stacks are written in a separate thread: the job may hang in the file system.
        """
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
