"""Exit codes of errors, Ctrl-C, and output that cannot be written."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.engines.live import wait_until
from megatron_grpo.engines.http import EngineError
from megatron_grpo.launch import process
from megatron_grpo.launch.process import answer_of, is_user_error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("lower it"), True),
        (FileNotFoundError(errno.ENOENT, "x"), True),
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EIO, "of a file"), False),
        (OSError(errno.ESTALE, "of a file"), False),
        (OSError(errno.ETIMEDOUT, "of a file"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "of a hub"), False),
        (EngineError("rollout engine http://a refuses"), False),
        (ModuleNotFoundError("No module named 'transformers'"), True),
        (RuntimeError("of ours"), False),
    ],
)
def test_is_user_error(error, expected):
    assert is_user_error(error) == expected


def test_a_python_that_does_not_answer_in_time_is_named(monkeypatch):
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.1)
    with pytest.raises(ValueError, match=f"rollout.python {sys.executable} has not answered for"):
        answer_of(Path(sys.executable), "import time; time.sleep(60)")


def test_ctrl_c_ends_a_command_while_it_imports(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        f"    pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "    time.sleep(60)\n"
        "except BaseException:\n"
        "    pass\n"
        "raise AttributeError\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_grpo", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as command:
        assert wait_until((tmp_path / "imported").exists, 30)
        command.send_signal(signal.SIGINT)
        _, output = command.communicate(timeout=30)
    assert (command.returncode, output) == (130, "megatron-grpo: interrupted\n")


PROGRAM = """
import sys
from rich.console import Console
from megatron_grpo.launch.process import outlive_readers
outlive_readers()
for line in sys.stdin:
    Console().print(line, end="")
    print(line, end="", file=sys.stderr)
print("done", file=open(sys.argv[1], "w"))
"""


def test_closed_pipe_ends_nothing_and_is_reported_on_stderr(tmp_path):
    done = tmp_path / "done"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, done],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("première\n")
    process.stdin.flush()
    assert process.stdout.readline() == "première\n"
    process.stdout.close()
    process.stdin.write("second\nthird\n")
    process.stdin.close()
    assert process.stderr.read().splitlines() == [
        "première",
        "megatron-grpo: nothing more is printed on stdout: [Errno 32] Broken pipe",
        "second",
        "third",
    ]
    assert process.wait(10) == 0 and done.exists()


def test_full_non_blocking_pipe_is_waited_for(tmp_path):
    given = tmp_path / "given"
    given.write_text(("x" * 79 + "\n") * 3000)  # the pipe holds 64 KiB
    program = f"import os; os.set_blocking(1, False)\n{PROGRAM}"
    with given.open() as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "done"],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    assert process.stdout
    first = process.stdout.readline()
    time.sleep(0.5)  # until the pipe is full
    assert first + process.stdout.read() == given.read_text()
    assert process.wait(10) == 0


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>&1"])
def test_closed_output_or_a_full_disk_ends_nothing(tmp_path, redirection):
    done = tmp_path / "done"
    command = shlex.join([sys.executable, "-c", PROGRAM, str(done)])
    subprocess.run(
        f"{command} {redirection}", shell=True, input="a line\n", text=True, check=True, timeout=60
    )
    assert done.exists()
