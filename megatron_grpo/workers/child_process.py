"""Processes that end with this one, with all their descendants; such as an engine."""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
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
    """Start a process as `Popen` does, from a thread that lasts as long as this process."""
    # PR_SET_PDEATHSIG, which ties children to this process, signals them when the *thread* that
    # started them ends, and threads of pools end before their process.
    started: Future[Popen[bytes]] = Future()
    _spawner(os.getpid()).put((started, lambda: Popen(command, **options)))
    return started.result()


@cache
def _spawner(pid: int) -> SimpleQueue[Start]:
    """Start the spawner thread of process `pid` and return its queue; a fork gets another one."""
    starts: SimpleQueue[Start] = SimpleQueue()
    threading.Thread(target=_serve, args=[starts], name="spawner", daemon=True).start()
    return starts


def _serve(starts: SimpleQueue[Start]) -> None:
    while True:
        started, start = starts.get()
        try:
            started.set_result(start())
        except BaseException as error:  # `spawn` raises it: this thread must last
            started.set_exception(error)
        del started, start  # nothing is held while the thread waits


@dataclass(frozen=True)
class ChildProcess:
    """A running process, the leader of its own process group."""

    process: Popen[bytes]
    folder: Path
    """TMPDIR of the process, removed with it: a killed engine leaves sockets and the like there. If
    this process is killed, `parent_death` removes it."""

    @classmethod
    def start(
        cls,
        command: list[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        errors: IO[bytes] | int = STDOUT,
    ) -> "ChildProcess":
        folder = Path(tempfile.mkdtemp(prefix="engine_"))
        if len(str(folder)) > MAX_FOLDER_LENGTH:  # TMPDIR may be long
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="engine_", dir="/tmp"))
        wrapper = [sys.executable, "-I", parent_death.__file__, str(os.getpid()), str(folder)]
        process = spawn(
            [*wrapper, *command],
            env={**environment, "TMPDIR": str(folder)},
            stdin=DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        return cls(process, folder)

    def end(self, within: float = 0.0) -> str:
        """Wait up to `within` seconds for its end; return how it ended, empty if it has not."""
        code = wait_for_end(self.process, within)
        return "" if code is None else f"ended with {describe_exit(code)}"

    def terminate(self, within: float) -> None:
        self.process.terminate()
        self.end(within)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its descendants, even stopped ones; remove its folder."""
        deadline = running_time() + KILL_SECONDS
        parent_death.kill_group(self.process.pid)
        self.end(within=KILL_SECONDS)
        with suppress(ProcessLookupError):  # raised when the group is empty
            while running_time() < deadline:  # `kill_group` spares some, which end by themselves
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
