"""Whole training runs, started as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TINY_CONFIG = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"


@dataclass(frozen=True)
class Finished:
    """A run that ended."""

    exit_code: int
    output: str
    seconds: float


def start_run(*arguments: str | Path, config: Path = TINY_CONFIG) -> subprocess.Popen[str]:
    """`megatron-grpo train CONFIG ARGUMENTS` in a process group of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_grpo.cli", "train", config, *arguments],
        cwd=TINY_CONFIG.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish_run(
    *arguments: str | Path, config: Path = TINY_CONFIG, timeout: float = 240
) -> Finished:
    """Start a run and wait for its end; kills it and all it started after `timeout` seconds."""
    start = time.monotonic()
    process = start_run(*arguments, config=config)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            descendant.kill()
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run took more than {timeout} s:\n{output}") from None
    return Finished(process.returncode, output, time.monotonic() - start)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_dir / "metrics.jsonl")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
