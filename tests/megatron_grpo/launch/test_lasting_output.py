"""A process whose output nobody reads any more goes on."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from rich.console import Console
from megatron_grpo.launch.lasting_output import outlive_readers
outlive_readers()
for line in sys.stdin:
    Console().print(line, end="")
    print(line, end="", file=sys.stderr)
print("done", file=open(sys.argv[1], "w"))
"""


def test_a_closed_pipe_ends_nothing_and_is_told_on_stderr(tmp_path: Path) -> None:
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


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with open("/dev/full", "wb") as full:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, done],
            input="a line\n",
            stdout=full,
            stderr=full,
            text=True,
            check=True,
            timeout=60,
        )
    assert done.exists()
