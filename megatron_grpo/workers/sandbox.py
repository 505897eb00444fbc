"""Runs Python programs that a model has written, under bubblewrap.

A program has no network, no files but its interpreter's and a folder in memory that it may write,
and limits of time, memory, processes and output. With `sandbox: none` it has limits alone, and
otherwise the rights of the user who trains.
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
"""Bytes of a file, stdout and stderr included, beyond which a program cannot write."""
MAX_PROCESSES = 32
"""Processes and threads of a program."""
MAX_FILES = 64
"""Open files of each of its processes."""
SCRATCH, FOLDER = "/tmp", "/tmp/program"
"""The folder that it may write, up to 1 / `SHARE` of a process's memory, and its own in there."""
SHARE = 4
SHARED_MEMORY = 16 << 20
"""Bytes of /dev/shm."""
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
FIRST_USER, NUM_USERS = 1 << 30, 1 << 30
"""Numbers of users without an account, see `_as_somebody`."""

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
"""Python's own first program, which says that it runs, and becomes the model's. Both files are
closed before, so that the model's can neither read itself nor take that word back."""


class SandboxError(ValueError):
    """No program can run here."""


@dataclass(frozen=True)
class Outcome:
    """Output and exit code of a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None: it was late, and was killed."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits and isolation of programs, each of which runs on its own.

    >>> await Sandbox().run("print(input()[::-1])", "abc")
    Outcome(stdout='cba\\n', stderr='', exit_code=0)
    """

    sandbox: Kind = "bubblewrap"
    python: str = sys.executable
    """The interpreter. Programs can import what is installed for it."""
    timeout: float = 10.0
    """Seconds that a program may take."""
    memory_megabytes: int = 1024
    """Address space (RLIMIT_AS) of each of its processes."""

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
        """Raise SandboxError if programs cannot run in it."""
        outcome = await self.run("print(6 * 7)")
        if outcome.stdout != "42\n":
            raise SandboxError(f"{self.python} did not run: {outcome.stderr[-300:].strip()}")

    async def run(self, program: str, stdin: str = "") -> Outcome:
        """Run it to its end; raises SandboxError if it did not begin."""
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
        """Run the program, and return its exit code; None if it was late. `files` are its stdin,
        stdout and stderr, itself, and the launcher's word that it has begun."""
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
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _command(self, files: Sequence[int]) -> list[str]:
        memory = self.memory_megabytes << 20
        # Unsandboxed, its processes would be counted together with all others of the user.
        processes = MAX_PROCESSES if self.sandbox == "bubblewrap" else -1
        limits = (memory, MAX_FILE, math.ceil(self.timeout) + 1, processes, MAX_FILES)
        launcher = [self.python, "-B", "-P", "-s", "-c", LAUNCHER, *map(str, (*limits, *files))]
        if self.sandbox == "none":
            return launcher
        paths = visible_paths(self.python)
        sandboxed = _bubblewrap(paths, memory // SHARE) + launcher
        return _as_somebody(paths) + sandboxed if _is_root() else sandboxed


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
    """The command that runs another one without network, and with no files but these."""
    return [
        *(_bwrap(), "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid"),
        *("--unshare-net", "--unshare-uts", "--unshare-cgroup", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--size", str(num_bytes), "--tmpfs", SCRATCH),
        # Behind it, as an interpreter may be installed there.
        *(*_read_only(paths), "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--dir", FOLDER, "--chdir", FOLDER, "--remount-ro", "/"),
    ]


def _as_somebody(paths: Sequence[str]) -> list[str]:
    """The command by which root runs another one as a user of its own, who can read these files.

    Linux limits the processes of each user but root, so that each program gets another one. The
    outer bubblewrap is there because this user may not enter root's folders.
    """
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
    """Whether this is the host's root, not somebody who is called root in a container."""
    mapped = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    return os.geteuid() == 0 and mapped == ["0", "0", str((1 << 32) - 1)]


@cache
def visible_paths(python: str) -> list[str]:
    """The system's folders, and the interpreter's; raises SandboxError if there is none."""
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
    """Unlike a pipe it blocks nobody: neither a program that reads no input nor one that floods."""
    file = os.memfd_create("program")
    os.pwrite(file, data, 0)
    return file


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
