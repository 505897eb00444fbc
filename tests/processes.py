"""Child processes of a test that talk to it over a pipe and end with it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distributed import CONTEXT


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def shared_memory(pids: list[int]) -> set[Path]:
    """The named shared memory that processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {file for file in map(Path, re.findall(r"/dev/shm/\S+", maps)) if file.exists()}


class Child:
    """A running process and the test's end of its pipe."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process = process
        self.pipe = pipe

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def say(self, value: Any = None) -> None:
        self.pipe.send(value)

    def hear(self, timeout: float = 30) -> Any:
        assert self.pipe.poll(timeout), "the process has not answered in time"
        return self.pipe.recv()

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        self._process.kill()
        self._process.join()


@contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Run the module-level `function(pipe, *args)` in another process, and kill it at the end."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    child = Child(process, ours)
    try:
        yield child
    finally:
        child.kill()
        ours.close()
