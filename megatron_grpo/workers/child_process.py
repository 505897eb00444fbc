"""Processes that end with this one, with all processes that they start; such as an engine."""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO, Any

from megatron_grpo.launch import parent_death
from megatron_grpo.launch.process import describe_exit
from parallel.clock import running_time, wait_for_end

MAX_FOLDER_LENGTH = 70
"""The kernel limits socket paths to 107 characters, and vLLM's socket names take 37."""
KILL_SECONDS = 5.0
"""Time in which SIGKILL ends a process, unless a device driver blocks it."""


Start = tuple[Future[Popen[bytes]], Callable[[], Popen[bytes]]]


def spawn(command: list[str], **options: Any) -> Popen[bytes]:
    """Start a process as `Popen` does, from a thread that lasts as long as this process.

    Linux signals a child that is tied to its parent when the *thread* that started it ends
    (PR_SET_PDEATHSIG), and threads of pools end before their process.
    """
    started: Future[Popen[bytes]] = Future()
    _spawner(os.getpid()).put((started, lambda: Popen(command, **options)))
    return started.result()


@cache
def _spawner(pid: int) -> SimpleQueue[Start]:
    """Start the spawner thread of process `pid`, and return its queue. A fork needs its own."""
    starts: SimpleQueue[Start] = SimpleQueue()
    threading.Thread(target=_serve, args=[starts], name="spawner", daemon=True).start()
    return starts


def _serve(starts: SimpleQueue[Start]) -> None:
    while True:
        started, start = starts.get()
        try:
            started.set_result(start())
        except BaseException as error:  # its caller raises it: this thread must last
            started.set_exception(error)
        del started, start  # nothing is held while the thread waits


@dataclass(frozen=True)
class ChildProcess:
    """A running process, the leader of its own process group."""

    process: Popen[bytes]
    folder: Path
    """Its TMPDIR, removed with it: a killed engine leaves sockets and the like there.

    If this process is killed, the process that `parent_death` leaves waiting removes it."""

    @classmethod
    def start(
        cls, command: list[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> "ChildProcess":
        """Start `command`, which writes to `output`."""
        folder = _make_folder()
        wrapper = [sys.executable, "-I", parent_death.__file__, str(os.getpid()), str(folder)]
        process = spawn(
            [*wrapper, *command],
            env={**environment, "TMPDIR": str(folder)},
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )
        return cls(process, folder)

    def end(self, within: float = 0.0) -> str:
        """How the process ended, if it ends within `within` seconds; else an empty string."""
        code = wait_for_end(self.process, within)
        return "" if code is None else f"ended with {describe_exit(code)}"

    def kill(self) -> None:
        """Kill it and all processes that it started, even stopped ones."""
        deadline = running_time() + KILL_SECONDS
        parent_death.kill_group(self.process.pid)
        self.end(within=KILL_SECONDS)
        self.kill_others(deadline)

    def kill_others(self, deadline: float) -> None:
        """Wait for the processes that it started, and kill those left at `deadline`.

        The deadline is one of `running_time`. Then removes its folder.
        """
        with suppress(ProcessLookupError):  # raised when the group is empty
            while running_time() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_folder() -> Path:
    """A new private folder whose path is short enough for the paths of an engine's sockets."""
    folder = tempfile.mkdtemp(prefix="engine_")
    if len(folder) > MAX_FOLDER_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="engine_", dir="/tmp")
    return Path(folder)


NUM_LOG_LINES_SHOWN = 12

# The last line of a traceback, as Python prints it or after the prefix of vLLM's log.
ERROR_LINE = re.compile(r"(\(.*?\) ERROR .*?\] )?[\w.]*(Error|Exception): \S")


@dataclass(frozen=True)
class EngineProcess:
    """A running engine."""

    url: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)  # it holds the token
    log: Path
    log_start: int
    """Size of the log when the engine started: earlier lines are from another run."""
    child: ChildProcess

    @classmethod
    def start(
        cls, command: list[str], environment: Mapping[str, str], url: str, log: Path
    ) -> "EngineProcess":
        """Start an engine with `command`, reachable at `url`; its output is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            log_start = output.tell()
            child = ChildProcess.start(command, environment, output)
        return cls(url, command, environment, log, log_start, child)

    @property
    def process(self) -> Popen[bytes]:
        """The engine itself."""
        return self.child.process

    def start_again(self) -> "EngineProcess":
        """Start the same engine again, with the same devices and address."""
        return self.start(self.command, self.environment, self.url, self.log)

    def log_tail(self) -> str:
        """The path of its log, with the first error and the last lines in it."""
        return f"{self.log} ends with\n{log_tail(self.log, self.log_start)}"


def log_tail(log: Path, start: int) -> str:
    """The first error in the log from byte `start` on, and the last lines.

    A process that dies takes others down, each with its own traceback: the first is the cause.
    """
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError as error:  # such as a log that somebody removed: its engine can go on
        return f"... ({error.strerror}: it cannot be shown)"
    errors = [line for line in lines if ERROR_LINE.match(line)]
    return "\n".join([*errors[:1], "...", *lines[-NUM_LOG_LINES_SHOWN:]])
