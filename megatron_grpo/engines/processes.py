"""Servers of a run: processes that it starts on this host, or addresses from the config."""

import re
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_grpo.bars import Show
from megatron_grpo.engines.http import EngineError, is_healthy
from megatron_grpo.workers.child_process import ChildProcess
from parallel.clock import running_time

TERMINATE_TIMEOUT = 10.0
EXIT_SECONDS = 0.5
"""Time for a failed server to exit by itself, so that its exit code is known."""
LOOPBACK = "127.0.0.1"
NUM_LOG_LINES_SHOWN = 12
# The last line of a traceback, as Python prints it or after the prefix of vLLM's log.
ERROR_LINE = re.compile(r"(\(.*?\) ERROR .*?\] )?[\w.]*(Error|Exception): \S")

Command = Callable[[int], tuple[list[str], dict[str, str]]]
"""Command line and environment of a server, by its port."""


@dataclass(frozen=True)
class ServerProcess(ChildProcess):
    """A running server."""

    url: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)  # it holds the token
    log: Path
    log_start: int
    """Size of the log when the server started: earlier lines are from another run."""

    @classmethod
    def serve(
        cls, command: list[str], environment: Mapping[str, str], url: str, log: Path
    ) -> "ServerProcess":
        """Start `command`, a server at `url`, with its output appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            log_start = output.tell()
            child = ChildProcess.start(command, environment, output)
        return cls(child.process, child.folder, url, command, environment, log, log_start)

    def log_tail(self) -> str:
        """The path of its log, the first error and the last lines."""
        return f"{self.log} ends with\n{log_tail(self.log, self.log_start)}"


def log_tail(log: Path, start: int) -> str:
    """First error and last lines of the log from byte `start` on; later errors follow from it."""
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError as error:  # such as a log that somebody removed: its engine can go on
        return f"... ({error.strerror}: it cannot be shown)"
    errors = [line for line in lines if ERROR_LINE.match(line)]
    return "\n".join([*errors[:1], "...", *lines[-NUM_LOG_LINES_SHOWN:]])


class ServerProcesses:
    """Servers at `base_urls`; those started here listen on loopback, and do not outlive this
    process."""

    kind = "rollout engine"
    """A server's name in messages."""

    def __init__(self, base_urls: tuple[str, ...], log_dir: Path) -> None:
        self.base_urls = base_urls
        self.are_ours = False
        """Whether the servers were started here, and so can be restarted."""
        self.processes: dict[str, ServerProcess] = {}
        """Servers that were started here, by address."""
        self._log_dir = log_dir
        self._ports: list[socket.socket] = []
        """Sockets that reserve the ports for restarts, until `close`."""

    def start(self, commands: dict[str, Command]) -> None:
        """Start a server for each command, with `NAME.log` in the folder of logs."""
        self._ports = [reserve_port() for _ in commands]
        for reserved, (name, command) in zip(self._ports, commands.items(), strict=True):
            port = reserved.getsockname()[1]
            url, log = f"http://{LOOPBACK}:{port}", self._log_dir / f"{name}.log"
            self.processes[url] = ServerProcess.serve(*command(port), url, log)
        self.base_urls, self.are_ours = tuple(self.processes), bool(self.processes)

    @property
    def awaited(self) -> str:
        """Servers that `wait_ready` waits for, in words."""
        if self.are_ours:
            return f"{self.kind}s start, logs in {self._log_dir}"
        return f"{self.kind}s at {', '.join(self.base_urls)}"

    def wait_ready(self, timeout: float, show: Show = lambda done, total: None) -> None:
        """Wait until all servers answer, with `show(ready, total)` as progress; raises if a server
        is dead, or after `timeout` seconds."""
        deadline = running_time() + timeout
        waiting = list(self.base_urls)
        while waiting := [url for url in waiting if not is_healthy(url)]:
            show(len(self.base_urls) - len(waiting), len(self.base_urls))
            self.check()
            if running_time() > deadline:
                raise TimeoutError(
                    f"{self.kind} {waiting[0]} did not answer within {timeout:g} s "
                    f"(rollout.startup_timeout){self.log_tail(waiting[0])}"
                )
            time.sleep(0.1)

    def check(self) -> None:
        for url in self.base_urls:
            if end := self.end(url):
                raise EngineError(f"{self.kind} {url} {end}{self.log_tail(url)}")

    def end(self, url: str) -> str:
        """Describe the exit of the server at `url`; empty while it runs or if it is not ours."""
        return self.processes[url].end() if url in self.processes else ""

    def log_tail(self, url: str) -> str:
        """The end of the log of a server started here, to be appended to an error message."""
        return f"; {self.processes[url].log_tail()}" if url in self.processes else ""

    def kill(self, url: str) -> str:
        """Kill a server of ours and its descendants; returns how it had ended by itself, or ""."""
        engine = self.processes[url]
        end = engine.end(within=EXIT_SECONDS)
        engine.kill()
        return end

    def restart(self, url: str) -> None:
        """Restart a killed server of ours at the same address; returns before it answers."""
        old = self.processes[url]
        self.processes[url] = ServerProcess.serve(old.command, old.environment, url, old.log)

    def close(self) -> None:
        """Terminate all servers, and kill what is left after TERMINATE_TIMEOUT; a server that is
        still starting is killed at once."""
        # In threads: a server that hangs holds up no other.
        with ThreadPoolExecutor(len(self.processes) or 1) as pool:
            list(pool.map(_end, self.processes.values()))
        for reserved in self._ports:
            reserved.close()
        self.processes.clear()
        self.are_ours = False


def _end(engine: ServerProcess) -> None:
    if is_healthy(engine.url):
        engine.terminate(within=TERMINATE_TIMEOUT)
    else:
        engine.kill()


def reserve_port() -> socket.socket:
    """Reserve a free loopback port by binding a socket to it."""
    reserved = socket.socket()
    # The engine sets it as well and can bind the port seconds later, as this socket never listens.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved
