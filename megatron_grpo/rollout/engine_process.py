"""One rollout engine as a process of this host, with all that it starts."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_grpo.launch import parent_death
from megatron_grpo.launch.exit_status import exit_words

COLLECTOR = "collector"
"""How the name of the thread begins that collects generations beside the main thread."""
NUM_LOG_LINES_SHOWN = 12
MAX_FOLDER_LENGTH = 70
"""The kernel takes paths of 107 characters for sockets, of which vLLM's names have 37."""
KILL_SECONDS = 5.0
"""Within which SIGKILL ends a process, unless a device holds it."""

# The last line of a traceback, as Python prints it or behind the prefix of vLLM's log.
ERROR_LINE = re.compile(r"(\(.*?\) ERROR .*?\] )?[\w.]*(Error|Exception): \S")


@dataclass(frozen=True)
class EngineProcess:
    """A running engine, the leader of its own process group."""

    url: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)  # it holds the token
    log: Path
    log_start: int
    """Size of the log when the engine started: earlier lines are another run's."""
    folder: Path
    """Its TMPDIR, which ends with it: sockets and the like that a killed engine leaves behind.

    Where this process is killed, what `parent_death` has left waiting removes it."""
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls, command: list[str], environment: Mapping[str, str], url: str, log: Path
    ) -> "EngineProcess":
        """Start the engine that `command` is, to be reached at `url`; it appends to `log`.

        Linux kills it when the thread that started it ends: only one that lasts as long as the run
        may, which is the main thread or the `COLLECTOR`.
        """
        assert (
            threading.current_thread() is threading.main_thread()
            or threading.current_thread().name.startswith(COLLECTOR)
        )
        folder = _make_folder()
        tied_to_us = [sys.executable, "-I", parent_death.__file__, str(os.getpid()), str(folder)]
        with log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                [*tied_to_us, *command],
                env={**environment, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(url, command, environment, log, log_start, folder, process)

    def start_again(self) -> "EngineProcess":
        """The same engine anew, with the same devices and address."""
        return self.start(self.command, self.environment, self.url, self.log)

    def end(self, within: float = 0.0) -> str:
        """How it ended, if it does so within some seconds; else an empty text."""
        try:
            return f"ended with {exit_words(self.process.wait(within))}"
        except subprocess.TimeoutExpired:
            return ""

    def last_words(self) -> str:
        """Where its log is, the first error in it, and its end."""
        return f"{self.log} ends with\n{log_tail(self.log, self.log_start)}"

    def kill(self) -> None:
        """End it at once with all that it started, even when it is stopped."""
        deadline = time.monotonic() + KILL_SECONDS
        parent_death.kill_group(self.process.pid)
        self.end(within=KILL_SECONDS)
        self.kill_others(deadline)

    def kill_others(self, deadline: float) -> None:
        """Wait for the processes that it started, and kill those left at `deadline` (monotonic).

        Its folder goes with them.
        """
        with suppress(ProcessLookupError):  # raised when the group is empty
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_folder() -> Path:
    """A new folder for this user alone, where the paths of an engine's sockets are short enough."""
    folder = tempfile.mkdtemp(prefix="engine_")
    if len(folder) > MAX_FOLDER_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="engine_", dir="/tmp")
    return Path(folder)


def log_tail(log: Path, start: int) -> str:
    """The first error in the log from byte `start` on, and its last lines.

    A process that dies takes others down, each with a traceback of its own: the first is the cause.
    """
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    errors = [line for line in lines if ERROR_LINE.match(line)]
    return "\n".join([*errors[:1], "...", *lines[-NUM_LOG_LINES_SHOWN:]])
