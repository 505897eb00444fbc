"""Complete training runs, started as a user would start them."""

import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_grpo.launch.parent_death import die_with_parent
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

RUN_MARK = "TEST_RUN_MARK"
TINY_CONFIG = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
NO_RESULTS = ("time/", "tokens_per_second", "probe/")


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    exit_code: int
    output: str
    cpu_seconds: float
    """CPU time of the run and of the children that it waited for; a busy machine adds nothing."""
    survivors: list[str]
    """Command lines of the run's processes that outlived it."""


def start_run(
    *arguments: str | Path, config: Path = TINY_CONFIG, mark: str = "", token: str = ""
) -> subprocess.Popen[str]:
    """Start `megatron-grpo train CONFIG ARGUMENTS`; its processes have `mark` in their environment.

    `token` belongs to the engines in `rollout.base_urls`.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {RUN_MARK: mark, TOKEN_VARIABLE: token}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_grpo", "train", config, *arguments],
        cwd=TINY_CONFIG.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
        encoding="utf-8",
    )


def _as_from_a_terminal() -> None:
    """Heed SIGINT, which a shell makes tests in the background ignore; end with the tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def finish_run(
    *arguments: str | Path, config: Path = TINY_CONFIG, timeout: float = 240, token: str = ""
) -> Finished:
    """Start a run and wait for its end; after `timeout` seconds kill it and all it started."""
    before, mark = _cpu_seconds_of_children(), uuid.uuid4().hex
    process = start_run(*arguments, config=config, mark=mark, token=token)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for marked in marked_processes(mark):
            marked.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the run took more than {timeout} s:\n{output}") from None
    cpu_seconds = _cpu_seconds_of_children() - before
    survivors = [" ".join(marked.cmdline()) for marked in marked_processes(mark)]
    return Finished(process.returncode, output, cpu_seconds, survivors)


def _cpu_seconds_of_children() -> float:
    """CPU seconds of child processes that have ended, and of their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes with `mark` in their environment, anywhere in the process tree."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == mark:
                found.append(process)
    return found


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_dir / "metrics.jsonl")


def results(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of each step that are equal in two equal runs: no times, and no probe, since a
    resumed run repeats it."""
    return [
        {name: value for name, value in record.items() if not name.startswith(NO_RESULTS)}
        for record in read_metrics(run_dir)
    ]


def steps_of(run_dir: Path) -> list[int]:
    """The steps in the log so far."""
    metrics = run_dir / "metrics.jsonl"
    return [record["step"] for record in read_json_lines(metrics)] if metrics.exists() else []


def read_completions(run_dir: Path) -> list[dict[str, Any]]:
    """Fields of each completion that are equal in two equal runs.

    Fields that depend on the last bits of the engine's log-probabilities are left out: rounding
    depends on the requests that happen to share a batch.
    """
    rows = read_json_lines(run_dir / "completions.jsonl")
    return [{k: v for k, v in row.items() if k != "logprob_gap"} for row in rows]


def read_timeline(run_dir: Path) -> list[dict[str, Any]]:
    """Events of a run that has ended."""
    return json.loads((run_dir / "timeline.json").read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
