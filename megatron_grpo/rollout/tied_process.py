"""A process that ends with this one, with all processes that it starts."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_grpo.launch import parent_death
from megatron_grpo.launch.exit_status import exit_words

COLLECTOR = "collector"
"""Name prefix of the thread that collects generations in parallel to the main thread."""
MAX_FOLDER_LENGTH = 70
"""The kernel limits socket paths to 107 characters, and vLLM's socket names take 37."""
KILL_SECONDS = 5.0
"""Time in which SIGKILL ends a process, unless a device driver blocks it."""


@dataclass(frozen=True)
class TiedProcess:
    """A running process, the leader of its own process group."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Its TMPDIR, removed with it: a killed engine leaves sockets and the like there.

    If this process is killed, the process that `parent_death` leaves waiting removes it."""

    @classmethod
    def start(
        cls, command: list[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> "TiedProcess":
        """Start `command`, which writes to `output`.

        Linux kills it when the thread that started it ends. So only a thread that lasts as long as
        the run may call this: the main thread or the `COLLECTOR`.
        """
        assert (
            threading.current_thread() is threading.main_thread()
            or threading.current_thread().name.startswith(COLLECTOR)
        )
        folder = _make_folder()
        tied_to_us = [sys.executable, "-I", parent_death.__file__, str(os.getpid()), str(folder)]
        process = subprocess.Popen(
            [*tied_to_us, *command],
            env={**environment, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(process, folder)

    def end(self, within: float = 0.0) -> str:
        """How the process ended, if it ends within `within` seconds; else an empty string."""
        try:
            return f"ended with {exit_words(self.process.wait(within))}"
        except subprocess.TimeoutExpired:
            return ""

    def kill(self) -> None:
        """Kill it and all processes that it started, even stopped ones."""
        deadline = time.monotonic() + KILL_SECONDS
        parent_death.kill_group(self.process.pid)
        self.end(within=KILL_SECONDS)
        self.kill_others(deadline)

    def kill_others(self, deadline: float) -> None:
        """Wait for the processes that it started, and kill those left at `deadline` (monotonic).

        Then removes its folder.
        """
        with suppress(ProcessLookupError):  # raised when the group is empty
            while time.monotonic() < deadline:
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
