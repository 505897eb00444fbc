"""Whole runs that end early because of a fault in one of their processes, as a user sees it.

`test_faults.py` has the other faults, on ranks without a launcher.
"""

import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from helpers.engines.live import wait_until
from helpers.runs.jobs import layout, write_sums
from helpers.runs.train import finish_run, marked_processes, read_metrics, start_run
from megatron_grpo.checkpoints.folders import latest_step

pytestmark = pytest.mark.fault


@pytest.fixture
def arguments(tied_model: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run with two ranks and its own engine."""
    return [
        f"model.path={tied_model}",
        f"data.path={write_sums(tmp_path)}",
        f"train.run_dir={tmp_path / 'run'}",
        *layout("tensor"),
    ]


@contextmanager
def training(arguments: list[str], run_dir: Path) -> Iterator[tuple[Popen[str], str]]:
    """A run that has ended a step, and the mark of its processes; none is left afterwards."""
    mark = uuid.uuid4().hex
    run = start_run(*arguments, "train.num_steps=500", mark=mark)
    try:
        metrics = run_dir / "metrics.jsonl"
        trains = lambda: metrics.exists() and metrics.stat().st_size  # noqa: E731
        assert wait_until(lambda: run.poll() is not None or trains(), 200) and trains()
        yield run, mark
        assert wait_until(lambda: not marked_processes(mark), 5)
    finally:
        for process in marked_processes(mark):
            process.kill()
        run.communicate()


def rank_process(mark: str, rank: int) -> psutil.Process:
    [found] = [
        process
        for process in marked_processes(mark)
        if process.environ().get("RANK") == str(rank) and "train" in process.cmdline()
    ]
    return found


def last_line(output: str) -> str:
    return output.splitlines()[-1]


# test_faults.py tests the ranks, and tests/slurm a whole job of Slurm.
@pytest.mark.slow
def test_stopped_run_saves_and_resumes(arguments, tmp_path):
    run_dir = tmp_path / "run"
    with training(arguments, run_dir) as (run, _):
        run.send_signal(signal.SIGTERM)
        run.send_signal(signal.SIGUSR1)
        output, _ = run.communicate(timeout=30)
    steps = len(read_metrics(run_dir))
    assert run.returncode == 75, output
    assert last_line(output) == (
        f"megatron-grpo: preempted: step {steps} saved; the same command resumes"
    )
    resumed = finish_run(*arguments, f"train.num_steps={steps + 1}")
    assert resumed.exit_code == 0, resumed.output
    assert [record["step"] for record in read_metrics(run_dir)] == list(range(1, steps + 2))


@pytest.mark.slow
def test_run_whose_output_nobody_reads_saves(arguments, tmp_path):
    """As `megatron-grpo train ... | tee log`, when a signal ends tee, too."""
    with training(arguments, tmp_path / "run") as (run, _):
        assert run.stdout
        run.stdout.close()
        run.stdout = None
        seen = len(read_metrics(tmp_path / "run"))
        assert wait_until(lambda: len(read_metrics(tmp_path / "run")) > seen + 1, 60)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 75
    assert latest_step(tmp_path / "run" / "checkpoints") == len(read_metrics(tmp_path / "run"))


FROM_THE_START = "megatron-grpo: interrupted: run the same command to begin from the start\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (signal.SIGTERM, 75, ""),
        pytest.param(signal.SIGUSR1, 75, "", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, FROM_THE_START, marks=pytest.mark.slow),
    ],
)
def test_run_is_stopped_while_it_is_checked(number, code, expected, arguments, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'loading')!r}).touch()\n"
        "time.sleep(60)\n"
        "def right(**_): return []\n"
    )
    run = start_run(*arguments, f"reward.functions=[{rewards}:right]")
    assert wait_until((tmp_path / "loading").exists, 60)
    run.send_signal(number)
    output, _ = run.communicate(timeout=20)
    assert (run.returncode, output) == (code, expected)


@pytest.mark.slow
def test_the_end_of_rank_0_is_reported_once_by_the_launcher(arguments, tmp_path):
    with training(arguments, tmp_path / "run") as (run, mark):
        rank_process(mark, 0).kill()
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert output.count("megatron-grpo: ") == 1 and "Traceback" not in output
    line = last_line(output)
    assert line.startswith("megatron-grpo: rank 0 on ") and line.endswith("(SIGKILL)")
    assert "died in " in line and "step " in line


@pytest.mark.slow
def test_ctrl_c_ends_everything_at_once(arguments, tmp_path):
    with training(arguments, tmp_path / "run") as (run, _):
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert output.count("megatron-grpo: interrupted") == 1 and "Traceback" not in output
    assert "run the same command to " in last_line(output)
