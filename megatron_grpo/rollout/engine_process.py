"""One rollout engine as a process on this host, with its log."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from megatron_grpo.rollout.tied_process import TiedProcess

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
    tied: TiedProcess

    @classmethod
    def start(
        cls, command: list[str], environment: Mapping[str, str], url: str, log: Path
    ) -> "EngineProcess":
        """Start an engine with `command`, reachable at `url`; its output is appended to `log`.

        The thread that calls this must last as long as the run: see `TiedProcess`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            log_start = output.tell()
            tied = TiedProcess.start(command, environment, output)
        return cls(url, command, environment, log, log_start, tied)

    @property
    def process(self) -> Popen[bytes]:
        """The engine itself."""
        return self.tied.process

    def start_again(self) -> "EngineProcess":
        """Start the same engine again, with the same devices and address."""
        return self.start(self.command, self.environment, self.url, self.log)

    def last_words(self) -> str:
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
