"""What our torchrun does differently from torch's; the ranks are shell scripts."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.engines import wait_until
from megatron_grpo.engines.server import reserve_port
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE

ONE_HOST = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=0"]
TORCHRUN = ["-m", "megatron_grpo.launch.torchrun"]
IMPATIENT = [
    "-c",
    "from megatron_grpo.launch import torchrun; torchrun.RENDEZVOUS_SECONDS = 2; torchrun.main()",
]
ENDING = [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
PATIENT = """
trap 'echo saved > saved_$RANK; exit 75' TERM USR1
touch ready_$RANK
while :; do sleep 0.05; done 2> /dev/null  # where bash tells that the signal ended sleep, too
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts torchrun with options and a script as ranks, and finally kills what is left."""
    started = []

    def start(
        script: str,
        *options: str,
        program: Sequence[str] = TORCHRUN,
        prepare: Callable[[], object] = lambda: None,
        **how: Any,
    ) -> subprocess.Popen[str]:
        def prepare_child() -> None:
            for number in ENDING:  # in the background, where these tests may be, some are ignored
                signal.signal(number, signal.SIG_DFL)
            prepare()

        command = [sys.executable, *program, *options]
        command += ["--no-python", "sh", "-c", script]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare_child,
            **how,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children() if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


@pytest.fixture
def torchrun(start, tmp_path):
    """Starts a script as two ranks."""
    options = [*ONE_HOST, "--nproc-per-node=2", "--redirects=1:3", f"--log-dir={tmp_path}"]
    return lambda script: start(script, *options)


@pytest.fixture
def port():
    """A port that is reserved for the test."""
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


@pytest.fixture
def two_hosts(start, port, tmp_path):
    """Starts a script as a rank on each of two hosts."""

    def two_hosts(script: str) -> list[subprocess.Popen[str]]:
        options = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        options += ["--nproc-per-node=1", "--redirects=3"]
        of_hosts = [[f"--node-rank={host}", f"--log-dir={tmp_path}/{host}"] for host in (0, 1)]
        return [start(script, *options, *of_host) for of_host in of_hosts]

    return two_hosts


def wait_ready(folder: Path) -> None:
    assert wait_until(lambda: all((folder / f"ready_{rank}").exists() for rank in range(2)), 60)


def test_preemption_signal_reaches_the_ranks_which_take_their_time(torchrun, tmp_path):
    run = torchrun(PATIENT)
    wait_ready(tmp_path)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(run.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    run.send_signal(signal.SIGUSR1)
    _, told = run.communicate(timeout=20)
    assert run.returncode == 75 and told == ""
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()


def test_ranks_killed_by_the_preemption_signal_count_as_preempted(torchrun, tmp_path):
    run = torchrun("touch ready_$RANK; exec sleep 100")
    wait_ready(tmp_path)
    run.send_signal(signal.SIGTERM)
    _, told = run.communicate(timeout=20)
    assert run.returncode == 75 and told == ""


@pytest.mark.parametrize("number", ENDING)
def test_signal_that_ends_a_run_is_its_exit_code(torchrun, tmp_path, number):
    run = torchrun("touch ready_$RANK; exec sleep 100")
    wait_ready(tmp_path)
    run.send_signal(number)
    _, told = run.communicate(timeout=20)
    assert run.returncode == 128 + number and told == ""


def test_an_interrupt_before_there_are_ranks_is_told_by_the_launcher(start, tmp_path):
    """It waits until torch is imported: the process that became this one has blocked it."""

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    options = [*ONE_HOST, "--nproc-per-node=1", f"--log-dir={tmp_path / 'run' / 'logs'}"]
    run = start("touch started", *options, prepare=block, env=os.environ | {LAUNCHER_VARIABLE: "1"})
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 130
    line = "megatron-grpo: interrupted: run the same command to begin from the start\n"
    assert told == line and not (tmp_path / "started").exists()


def test_signals_that_it_was_started_to_ignore_end_nothing(start, tmp_path):
    def ignore() -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    options = [*ONE_HOST, "--nproc-per-node=1", f"--log-dir={tmp_path}"]
    run = start("touch ready; until [ -e done ]; do sleep 0.05; done", *options, prepare=ignore)
    assert wait_until((tmp_path / "ready").exists, 60)
    [rank] = psutil.Process(run.pid).children()
    for number in ENDING:
        run.send_signal(number)
        rank.send_signal(number)
    time.sleep(1.0)
    (tmp_path / "done").touch()
    _, told = run.communicate(timeout=20)
    assert run.returncode == 0 and told == ""


def test_report_of_rank_0_is_not_repeated(torchrun):
    run = torchrun("echo told >&2; exit 2")
    _, told = run.communicate(timeout=60)
    assert run.returncode == 2 and told.replace("told\n", "") == ""


def test_failure_before_the_watchdog_begins_is_reported_by_the_end_of_the_log(torchrun):
    run = torchrun("[ $RANK = 0 ] && exec sleep 100; echo no such module >&2; exit 1")
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    assert told.startswith(f"rank 1 failed first on {socket.gethostname()}; ") and told.endswith(
        "no such module\n"
    )


def test_death_of_rank_0_is_reported_with_the_verdict_of_the_others(torchrun):
    verdict = "megatron-grpo: rank 0 died in phase train of step 3"
    # torchrun makes $ of $$.
    run = torchrun(
        "[ $RANK = 0 ] && until [ -e told ]; do sleep 0.05; done && kill -9 $$$$;"
        f"echo {verdict} >&2; touch told; exec sleep 100"
    )
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    assert told == f"{verdict} (SIGKILL)\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("megatron-grpo: rank 0 died in phase train of step 3", ""),  # rank 0's host reports it
        ("no such module", "rank 1 failed first on "),
    ],
)
def test_host_without_rank_0_reports_only_what_no_watchdog_has(two_hosts, log, expected):
    _, run = two_hosts(f"[ $RANK = 0 ] && exec sleep 100; echo {log} >&2; exit 1")
    _, printed = run.communicate(timeout=60)
    assert run.returncode == 1
    if expected:
        assert printed.startswith(expected) and printed.endswith(f"{log}\n")
    else:
        assert printed == ""


@pytest.mark.parametrize("host", [0, 1])
def test_hosts_that_do_not_meet_are_named_in_a_line(start, port, tmp_path, host):
    options = ["--nnodes=3", f"--node-rank={host}", "--master-addr=127.0.0.1"]
    options += [f"--master-port={port}", "--nproc-per-node=1", f"--log-dir={tmp_path}"]
    run = start("exit 0", *options, program=IMPATIENT)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 1
    here, place = socket.gethostname(), f"127.0.0.1:{port}"
    if host == 0:
        assert told == (
            f"megatron-grpo: 2 of 3 hosts did not come to {place} on {here} within 2 s: host 1, 2, "
            "counted from 0; their logs may say why\n"
        )
    else:
        assert told.splitlines()[-1].startswith(
            f"megatron-grpo: host 1 ({here}) did not reach the first of the 3 at {place} within 2 s"
        )


def test_ranks_may_open_as_many_files_as_the_hard_limit(start, tmp_path):
    def few() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    options = [*ONE_HOST, "--nproc-per-node=1", f"--log-dir={tmp_path}"]
    run = start("ulimit -Sn >limit; ulimit -Hn >>limit", *options, prepare=few)
    run.communicate(timeout=60)
    soft, hard = (tmp_path / "limit").read_text().split()
    assert soft == hard != "256"
