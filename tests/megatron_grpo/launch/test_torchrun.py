"""How our torchrun differs from torch's; the ranks are shell scripts.

It is forked from a process that has imported torch, except where the start itself is tested.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from helpers.engines.live import wait_until
from helpers.ranks.processes import CONTEXT
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.launch import meeting, torchrun
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE
from megatron_grpo.launch.process import START_SIGNALS

ONE_HOST = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=0"]
HERE = socket.gethostname()
ENDING = [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
PATIENT = """
trap 'echo saved > saved_$RANK; exit 75' TERM USR1
touch ready_$RANK
while :; do sleep 0.05; done 2> /dev/null  # where bash tells that the signal ended sleep, too
"""


class Torchrun:
    """A torchrun in a process of its own, with a script as ranks."""

    def __init__(self, folder: Path, script: str, options: Sequence[str], **how: Any) -> None:
        self._stderr = folder / f"stderr_{uuid.uuid4().hex}"
        arguments = [*options, "--no-python", "sh", "-c", script]
        self._process = CONTEXT.Process(
            target=_torchrun, args=(folder, self._stderr, arguments), kwargs=how
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the text on stderr."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it has not ended in time"
        return self._process.exitcode, self._stderr.read_text()

    def kill(self) -> None:
        for child in psutil.Process(self.pid).children() if self._process.is_alive() else []:
            child.kill()
        self._process.kill()
        self._process.join()


def _torchrun(
    folder: Path,
    stderr: Path,
    arguments: Sequence[str],
    *,
    ignored: Sequence[int] = (),
    open_files: int | None = None,
    patience: float = 600,
) -> None:
    os.chdir(folder)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    for number in ENDING:  # a background job, as these tests may be, starts with some ignored
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    if open_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
    sys.argv = ["torchrun", *arguments]
    meeting.RENDEZVOUS_SECONDS = patience
    torchrun.main()


@pytest.fixture
def start(tmp_path: Path):
    """Start torchrun with options and a script as ranks, and kill at last what is left."""
    started = []

    def start(script: str, *options: str, **how: Any) -> Torchrun:
        started.append(Torchrun(tmp_path, script, options, **how))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def two_ranks(start, tmp_path):
    """Starts a script as two ranks."""
    options = [*ONE_HOST, "--nproc-per-node=2", f"--log-dir={tmp_path}"]
    return lambda script: start(script, *options)


@pytest.fixture
def port():
    """A port that is reserved for the test."""
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


@pytest.fixture
def two_hosts(start, port, tmp_path):
    """Start a script as a rank on each of two hosts."""

    def two_hosts(script: str) -> list[Torchrun]:
        options = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        options += ["--nproc-per-node=1"]
        of_hosts = [[f"--node-rank={host}", f"--log-dir={tmp_path}/{host}"] for host in (0, 1)]
        return [start(script, *options, *of_host) for of_host in of_hosts]

    return two_hosts


def wait_ready(folder: Path) -> None:
    assert wait_until(lambda: all((folder / f"ready_{rank}").exists() for rank in range(2)), 60)


def test_preemption_signal_reaches_the_ranks_which_take_their_time(two_ranks, tmp_path):
    run = two_ranks(PATIENT)
    wait_ready(tmp_path)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(run.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    run.send_signal(signal.SIGUSR1)
    assert run.end(timeout=60) == (75, "")
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_code_is_that_of_the_signal_that_ends_the_ranks(two_ranks, tmp_path, number, expected):
    run = two_ranks("touch ready_$RANK; exec sleep 100")
    wait_ready(tmp_path)
    run.send_signal(number)
    assert run.end(timeout=60) == (expected, "")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (
            signal.SIGINT,
            130,
            "megatron-grpo: interrupted: run the same command to begin from the start\n",
        ),
        (signal.SIGTERM, 75, ""),
    ],
)
def test_a_signal_before_there_are_ranks_is_reported_by_the_launcher(tmp_path, number, code, line):
    """The signal is blocked until torch is imported, as by the process that became this one."""

    def block() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, START_SIGNALS)

    options = [*ONE_HOST, "--nproc-per-node=1", f"--log-dir={tmp_path / 'run' / 'logs'}"]
    command = [sys.executable, "-m", "megatron_grpo.launch.torchrun", *options, "--no-python"]
    with subprocess.Popen(
        [*command, "sh", "-c", "touch started"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=block,
        env=os.environ | {LAUNCHER_VARIABLE: "1"},
    ) as run:
        run.send_signal(number)
        _, output = run.communicate(timeout=60)
    assert (run.returncode, output) == (code, line)
    assert not (tmp_path / "started").exists()


def test_torchrun_ignores_signals_it_was_started_to_ignore(start, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    options = [*ONE_HOST, "--nproc-per-node=1", f"--log-dir={tmp_path}"]
    script = "ulimit -Sn > limit; touch ready; until [ -e done ]; do sleep 0.05; done"
    run = start(script, *options, ignored=ENDING, open_files=256)
    assert wait_until((tmp_path / "ready").exists, 60)
    [rank] = psutil.Process(run.pid).children()
    for number in ENDING:
        run.send_signal(number)
        rank.send_signal(number)
    time.sleep(1.0)
    (tmp_path / "done").touch()
    assert run.end(timeout=60) == (0, "")
    assert (tmp_path / "limit").read_text().split() == [str(hard)]


def test_torchrun_shows_the_log_of_a_failure_elsewhere(two_hosts):
    _, run = two_hosts("[ $RANK = 0 ] && exec sleep 100; echo no such module >&2; exit 1")
    code, output = run.end(timeout=60)
    assert code == 1
    assert output.startswith(f"rank 1 failed first on {HERE}; ")
    assert output.endswith("no such module\n")


VERDICT = "megatron-grpo: rank 0 died in phase train of step 3"


REPORTS = {  # exit code, number on its host, and log of each rank; the report, with * for the log
    "of rank 0 is there": ({0: (2, 0, "log"), 1: (1, 1, "")}, ""),
    "before the watchdog begins": (
        {1: (1, 1, "no such module"), 0: (-15, 0, "")},
        f"rank 1 failed first on {HERE}; * ends with\nno such module",
    ),
    "of the others, if rank 0 dies": (
        {0: (-9, 0, ""), 1: (-15, 1, VERDICT)},
        f"{VERDICT} (SIGKILL)",
    ),
    "of rank 0 alone": ({0: (-9, 0, "")}, f"megatron-grpo: rank 0 on {HERE} was ended by SIGKILL"),
    "is made on the host of rank 0": ({2: (1, 0, VERDICT)}, ""),
}


@pytest.mark.parametrize(("ranks", "expected"), REPORTS.values(), ids=REPORTS)
def test_report_of_a_failure(ranks, expected, tmp_path):
    failures = {}
    for rank, (code, local_rank, text) in ranks.items():
        log = tmp_path / "job" / "attempt_0" / str(local_rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
        failures[rank] = ProcessFailure(local_rank, 1, code, "")
    report = torchrun._failure_report(failures, tmp_path)
    assert report.replace(f"{tmp_path}/job/attempt_0/1/stderr.log", "*") == expected


@pytest.mark.parametrize("host", [0, 1])
def test_hosts_that_do_not_meet_are_named_in_a_line(start, port, tmp_path, host):
    options = ["--nnodes=3", f"--node-rank={host}", "--master-addr=127.0.0.1"]
    options += [f"--master-port={port}", "--nproc-per-node=1", f"--log-dir={tmp_path}"]
    run = start("exit 0", *options, patience=2)
    code, output = run.end(timeout=60)
    assert code == 75
    place = f"127.0.0.1:{port}"
    if host == 0:
        assert output == (
            f"megatron-grpo: 2 of 3 hosts did not connect to {place} on {HERE} within 2 s: host 1, "
            "2, counted from 0; their logs may say why\n"
        )
    else:
        assert output.splitlines()[-1].startswith(
            f"megatron-grpo: host 1 ({HERE}) did not reach the first of the 3 at {place} within 2 s"
        )
