"""Runs Python programs written by a model, under bubblewrap.

A program has no network, its interpreter's files to read, a folder in memory to write, and limits
of time, memory, processes and output. With `sandbox: none` it has the limits alone, and the rights
of the user who trains.
"""

import asyncio
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["bubblewrap", "none"]
MAX_FILE = 16 << 20
"""Maximum bytes of any file that a program writes, stdout and stderr included."""
MAX_PROCESSES = 32
"""Processes and threads of a program."""
MAX_FILES = 64
"""Open files of each process."""
SCRATCH, FOLDER = "/tmp", "/tmp/program"
"""The writable folder, of 1 / `SHARE` of a process's memory, and the working directory in it."""
SHARE = 4
SHARED_MEMORY = 16 << 20
"""Bytes of /dev/shm."""
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
FIRST_USER, NUM_USERS = 1 << 30, 1 << 30
"""User ids without an account, see `_as_own_user`."""

LAUNCHER = """
import os, resource, sys
memory, size, seconds, processes, files, source_fd, started_fd = map(int, sys.argv[1:])
for name, most in (("AS", memory), ("FSIZE", size), ("CPU", seconds), ("NPROC", processes),
                   ("NOFILE", files), ("CORE", 0)):
    if most >= 0:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
with open(source_fd, "rb") as file:
    source = file.read()
os.write(started_fd, bytes(1))
os.close(started_fd)
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""
"""Sets limits, reports the start by a byte in `started_fd`, and becomes the model's program. Both
files are closed before: the program can neither read itself nor erase the report."""


class SandboxError(ValueError):
    """No program can run here."""


@dataclass(frozen=True)
class Outcome:
    """Output and exit code of a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None if it was killed after the time limit."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits and isolation of programs.

    >>> await Sandbox().run("print(input()[::-1])", "abc")
    Outcome(stdout='cba\\n', stderr='', exit_code=0)
    """

    sandbox: Kind = "bubblewrap"
    python: str = sys.executable
    """The interpreter, whose installed packages programs can import."""
    timeout: float = 10.0
    """Maximum seconds of a program."""
    memory_megabytes: int = 1024
    """Address space (RLIMIT_AS) of each process."""

    def __post_init__(self) -> None:
        if self.sandbox not in get_args(Kind):
            raise ValueError(f"sandbox {self.sandbox!r} is unknown: use bubblewrap or none")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout {self.timeout} must be above 0, such as 10")
        if self.memory_megabytes < 64:
            raise ValueError(
                f"memory_megabytes {self.memory_megabytes} is too little for Python: use at least "
                "64, such as 1024"
            )

    async def check(self) -> None:
        """Raise SandboxError if no program can run."""
        outcome = await self.run("print(6 * 7)")
        if outcome.stdout != "42\n":
            raise SandboxError(f"{self.python} did not run: {outcome.stderr[-300:].strip()}")

    async def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program to its end; raises SandboxError if it did not begin."""
        given = (stdin, "", "", program, "")
        files = [_file_in_memory(text.encode(errors="replace")) for text in given]
        try:
            code = await self._run(files)
            _, stdout, stderr, _, started = (os.pread(file, MAX_FILE, 0) for file in files)
        finally:
            for file in files:
                os.close(file)
        if not started:
            message = _text(stderr)[-300:].strip() or "it was late"
            raise SandboxError(f"no program runs under {self.sandbox} here: {message}")
        return Outcome(_text(stdout), _text(stderr), code)

    async def _run(self, files: Sequence[int]) -> int | None:
        """Run the program in `files` (stdin, stdout, stderr, source, report of its start); returns
        its exit code, None after the time limit."""
        process = await asyncio.create_subprocess_exec(
            *self._command(files[3:]),
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            pass_fds=files[3:],
            start_new_session=True,
            env=_variables(self.python),
            cwd=SCRATCH,
        )
        try:
            return await asyncio.wait_for(process.wait(), self.timeout)
        except TimeoutError:
            return None
        finally:
            with suppress(ProcessLookupError):
                # Even after its end: it may have left processes behind in its group.
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _command(self, files: Sequence[int]) -> list[str]:
        memory = self.memory_megabytes << 20
        # Unsandboxed, RLIMIT_NPROC would count all processes of the user.
        processes = MAX_PROCESSES if self.sandbox == "bubblewrap" else -1
        limits = (memory, MAX_FILE, math.ceil(self.timeout) + 1, processes, MAX_FILES)
        launcher = [self.python, "-B", "-P", "-s", "-c", LAUNCHER, *map(str, (*limits, *files))]
        if self.sandbox == "none":
            return launcher
        paths = visible_paths(self.python)
        sandboxed = _bubblewrap(paths, memory // SHARE) + launcher
        return _as_own_user(paths) + sandboxed if _is_root() else sandboxed


def _bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "programs of the model run under bubblewrap, and this host has no bwrap: install the "
            "package bubblewrap (0.8 or later), or let them run unsandboxed, with your rights, by "
            "sandbox: none"
        )
    return found


def _bubblewrap(paths: Sequence[str], num_bytes: int) -> list[str]:
    """Command prefix for a program without network, and with no files but `paths`."""
    return [
        *(_bwrap(), "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid"),
        *("--unshare-net", "--unshare-uts", "--unshare-cgroup", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--size", str(num_bytes), "--tmpfs", SCRATCH),
        # After --tmpfs, which would hide an interpreter that is installed there.
        *(*_read_only(paths), "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--dir", FOLDER, "--chdir", FOLDER, "--remount-ro", "/"),
    ]


def _as_own_user(paths: Sequence[str]) -> list[str]:
    """Command prefix by which root runs a program as a user of its own, who can read `paths`."""
    # A user for each program, as RLIMIT_NPROC counts per user, and not at all for root. The outer
    # bubblewrap opens root's folders, which this user may not enter.
    user = str(FIRST_USER + secrets.randbelow(NUM_USERS))
    folders = {str(folder) for path in paths for folder in Path(path).parents}
    return [
        *(_bwrap(), "--die-with-parent", "--cap-drop", "ALL"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *(word for each in sorted({*folders, SCRATCH} - {"/"}) for word in _open_folder(each)),
        *(*_read_only(paths), "--bind", "/proc", "/proc", "--dev", "/dev"),
        *("setpriv", "--reuid", user, "--regid", user, "--clear-groups"),
    ]


def _open_folder(path: str) -> tuple[str, ...]:
    return ("--perms", "0755", "--dir", path)


def _read_only(paths: Sequence[str]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind", path, path)]


def _is_root() -> bool:
    """Whether this user is root on the host, not only in a user namespace of a container."""
    mapped = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    return os.geteuid() == 0 and mapped == ["0", "0", str((1 << 32) - 1)]


@cache
def visible_paths(python: str) -> list[str]:
    """Folders of the system and the interpreter; raises SandboxError without an interpreter."""
    program = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        printed = subprocess.run([python, "-c", program], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxError(f"python {python}: {error}") from None
    system = [path for path in SYSTEM if Path(path).exists()]
    own = [
        path for path in dict.fromkeys(json.loads(printed)) if not Path(path).is_relative_to("/usr")
    ]
    return system + own


def _variables(python: str) -> dict[str, str]:
    return {
        "PATH": f"{Path(python).parent}:/usr/bin:/bin",
        "HOME": SCRATCH,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # a program that prints a set has the same reward again
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _file_in_memory(data: bytes) -> int:
    """Put `data` into a file in memory, and return its descriptor."""
    # Unlike a pipe, it blocks neither on a program that reads no input nor on a flood of output.
    file = os.memfd_create("program")
    os.pwrite(file, data, 0)
    return file


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
