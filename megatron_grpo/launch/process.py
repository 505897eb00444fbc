"""Signals, exit codes, output streams and open files of this process; answers of another Python."""

import errno
import io
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: nothing has failed, and the same command resumes the run."""

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""The code by which a shell reports Ctrl-C."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they reclaim the machine."""

STDOUT, STDERR = 1, 2

ANSWER_SECONDS = 60
"""Longest wait for the Python of another environment: a shared file system may be slow."""

SPINNER_END = "\r\033[2K\033[?25h"
"""Escape codes that clear a spinner's line and show the hidden cursor."""

START_SIGNALS = {signal.SIGINT, *PREEMPTION_SIGNALS}
"""Signals that wait while the process that starts a run becomes its torchrun."""


def exit_when_preempted() -> AbstractContextManager[None]:
    """Exit with EXIT_PREEMPTED on a preemption signal in the block: there is nothing to save."""
    return when_preempted(lambda _, frame: _end(EXIT_PREEMPTED, frame))


@contextmanager
def when_preempted(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle preemption signals in the block, in the main thread."""
    before = {number: signal.signal(number, handler) for number in PREEMPTION_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def exit_when_interrupted(text: Callable[[], str] | None) -> None:
    """Let Ctrl-C print the line `text()` and end this process, closing open resources; None: at
    once and silently. A process started to ignore Ctrl-C goes on ignoring it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    if text is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return

    def end(_: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would cut the closing short
        _end(EXIT_INTERRUPTED, frame, f"megatron-grpo: {text()}\n")

    signal.signal(signal.SIGINT, end)


def _end(code: int, frame: FrameType | None, line: str = "") -> None:
    """Print `line` in a handler, and exit. `frame`: the interrupted frame."""
    end_of_spinner = SPINNER_END if os.isatty(STDERR) else ""
    # Not print: the signal may have interrupted one, and a buffer refuses a second writer.
    os.write(STDERR, f"{end_of_spinner}{line}".encode())
    # C code that imports may drop the exception of sys.exit, and fail later.
    if _is_importing(frame):
        os._exit(code)
    sys.exit(code)


def _is_importing(frame: FrameType | None) -> bool:
    files = []
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return "<frozen importlib._bootstrap>" in files


class Preempted(Exception):
    """A scheduler stops the run; the message says what is saved."""


def describe_exit(code: int) -> str:
    """`exit code N` or `signal NAME`, for a return code of `subprocess`."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


TRANSIENT_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a network file system while its server cannot be reached."""


def is_user_error(error: BaseException) -> bool:
    """Whether `error`, raised before the first step, is a mistake in config, model or data: the
    same command would fail again."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return False
    if isinstance(error, OSError):
        return error.errno not in TRANSIENT_ERRORS
    return isinstance(error, (ValueError, ModuleNotFoundError))


def outlive_readers() -> None:
    """Let this process survive a stdout or stderr that fails, by a full disk or a closed pipe."""
    # The signal on which a run saves may also end the `tee` behind it, or the terminal.
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None: closed when the process was started
            raw = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
            setattr(sys, name, text)


class LastingFile(io.FileIO):
    """An open file that becomes /dev/null once it cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            while (num_bytes := super().write(data)) is None:  # a non-blocking pipe that is full
                select.select([], [self.fileno()], [])
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == STDOUT:
                print(f"megatron-grpo: nothing more is printed on stdout: {error}", file=sys.stderr)
            return super().write(data)
        return num_bytes


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard limit, also for children."""
    # Some systems default to 1,024: too few for a connection per request and several per rank.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def silence_libraries() -> None:
    """Suppress warnings of libraries that are meant for developers, not for users of a run."""
    for module in ("megatron", "torch", "tqdm", "parallel.cpu_device"):
        warnings.filterwarnings("ignore", module=rf"{module}\b")
    for module in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(module).setLevel(logging.ERROR)


def answer_of(python: Path, program: str) -> str:
    """Output of `program` in the environment of rollout.python; empty if it fails.

    Raises ValueError if the interpreter cannot be started or does not end in time.
    """
    command = [str(python), "-P", "-c", program]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, encoding="utf-8"
        )
    except OSError as error:
        raise ValueError(f"rollout.python {python} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"rollout.python {python} has not answered for {ANSWER_SECONDS} s: is its file system "
            "slow?"
        ) from None
    return found.stdout.strip()
