"""The benchmarks run to their ends; `tests/test_bench_step.py` uses a small model."""

import json
import os
import subprocess
import sys
from pathlib import Path


def lines(name: str, *arguments: str) -> list[str]:
    """Lines that the benchmark prints."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(*arguments: str) -> dict[str, float]:
    """The JSON line of an optimizer step."""
    found: dict[str, float] = json.loads(lines("bench_step.py", *arguments)[-1])
    return found


def test_16384_tokens_of_the_real_shape_fit_into_24_gib():
    found = run("--tokens", "16384", "--steps", "3")
    print(json.dumps(found))
    assert found["allocated_gib"] < 24


def test_bench_parts_measures_pushes_and_log_probabilities():
    found = lines("bench_parts.py")
    print("\n".join(found))
    assert len(found) == 8
