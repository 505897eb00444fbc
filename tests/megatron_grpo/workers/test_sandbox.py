"""What programs can do in the sandbox, and what they cannot."""

import asyncio
import os
import socket
import time
from dataclasses import replace

import psutil
import pytest

from helpers.engines.live import wait_until
from helpers.runs.sandboxes import needs_bubblewrap
from megatron_grpo.workers.sandbox import MAX_PROCESSES, Sandbox, SandboxError

MEGABYTES = 255  # no other programs on this machine have that limit
SANDBOX = Sandbox(timeout=60, memory_megabytes=MEGABYTES)
SECONDS = 2.0


def run(program, stdin="", sandbox=SANDBOX):
    return asyncio.run(sandbox.run(program, stdin))


@needs_bubblewrap
def test_sandbox_gives_input_and_imports():
    outcome = run("import numpy; print(numpy.array(input().split(), int).sum())", "1 2\n3")
    assert (outcome.stdout, outcome.stderr, outcome.exit_code) == ("3\n", "", 0)
    assert run("import sys; sys.exit(3)").exit_code == 3
    assert "ZeroDivisionError" in run("1 / 0").stderr


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', {port}))", "ConnectionRefused"),
        ("import socket; socket.create_connection(('192.0.2.1', 80))", "unreachable"),
        ("open('{folder}/secret').read()", "No such file"),
        ("import os; os.kill({pid}, 9)", "ProcessLookupError"),
        ("import os; open(os.__file__, 'w')", "Read-only"),
        ("open('/program', 'w')", "Read-only"),
        ("open('/dev/program', 'w')", "Read-only"),
        ("open('/proc/sys/kernel/hostname', 'w')", "Error"),
        ("import os; os.unshare(os.CLONE_NEWUSER)", "No space left"),
        ("import os; os.setuid(0)", "Invalid argument"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 1 << 30)", "Cannot allocate"),
        ("open('a', 'wb').write(bytes(32 << 20))", "File too large"),
        ("for i in range(9): open(str(i), 'wb').write(bytes(8 << 20))", "No space left"),
        ("for i in range(9): open(f'/dev/shm/{{i}}', 'wb').write(bytes(8 << 20))", "No space left"),
        ("print('x' * (1 << 25))", "File too large"),
    ],
)
def test_sandbox_hides_the_world_outside(program, error, tmp_path, listener):
    (tmp_path / "secret").write_text("secret")
    given = {"port": listener, "folder": tmp_path, "pid": os.getpid()}
    outcome = run(program.format(**given))
    assert outcome.exit_code != 0
    assert error in outcome.stderr, outcome


@pytest.fixture
def listener():
    """A port on which somebody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs_bubblewrap
def test_sandbox_hides_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os; print(os.environ, os.listdir('/proc/self/fd'))").stdout


@needs_bubblewrap
def test_sandbox_hides_other_programs():
    assert run("import os; open('a', 'w'); print(os.listdir())").stdout == "['a']\n"
    seen = run("import os; print(os.listdir(), [p for p in os.listdir('/proc') if p.isdigit()])")
    assert seen.stdout.startswith("[] [")
    assert len(seen.stdout.split()) < 5


@needs_bubblewrap
def test_sandbox_limits_processes_and_leaves_none():
    program = """
import os, time
for number in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
print(number)
"""
    assert 10 < int(run(program).stdout) < MAX_PROCESSES
    assert not left_behind()


@needs_bubblewrap
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_sandbox_kills_a_late_program(program):
    began = time.monotonic()
    outcome = run(
        f"print('begun', flush=True)\n{program}", sandbox=replace(SANDBOX, timeout=SECONDS)
    )
    assert outcome.exit_code is None and outcome.stdout == "begun\n"
    assert time.monotonic() - began < SECONDS + 5
    assert not left_behind()


def left_behind():
    """Processes that run a program; killed ones need a moment to end."""

    def found():
        commands = [each.info["cmdline"] or () for each in psutil.process_iter(["cmdline"])]
        return [command for command in commands if str(MEGABYTES << 20) in command]

    wait_until(lambda: not found(), 30)
    return found()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import os; os.ftruncate(1, 0)", ""),
        ("open('/dev/stdout', 'w').write('5')", "5"),
        ("print(open('/dev/stdin').read())", "input\n"),
        ("import os; print(os.listdir('/proc/self/fd'))", "['0', '1', '2', '3']\n"),
        ("print('x' * (4 << 20))", "x" * (4 << 20) + "\n"),
    ],
)
def test_sandbox_gives_files_of_its_own(program, printed):
    """The last of the four files is the listed folder itself."""
    outcome = run(program, "input")
    assert (outcome.stdout, outcome.exit_code) == (printed, 0)


def test_sandbox_needs_bubblewrap_or_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"install the package bubblewrap .*sandbox: none"):
        asyncio.run(SANDBOX.check())
    unsandboxed = replace(SANDBOX, sandbox="none", timeout=SECONDS)
    asyncio.run(unsandboxed.check())
    assert "MemoryError" in run("bytearray(1 << 30)", sandbox=unsandboxed).stderr
    assert run("while True: pass", sandbox=unsandboxed).exit_code is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sandbox": "docker"}, "use bubblewrap or none"),
        ({"timeout": 0}, "timeout 0 must be above 0"),
        ({"memory_megabytes": 1}, "use at least 64"),
        ({"python": "/no/python", "sandbox": "none"}, "No such file"),
    ],
)
def test_sandbox_refuses_wrong_arguments(arguments, error):
    with pytest.raises((ValueError, OSError), match=error):
        asyncio.run(Sandbox(**arguments).check())
