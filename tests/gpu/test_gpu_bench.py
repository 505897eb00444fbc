"""The benchmark of a step runs to its end: a small model on any machine, the real one on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).with_name("bench_step.py")


def run(*arguments: str) -> dict[str, float]:
    """The JSON line that the benchmark prints."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_with_a_tiny_model_it_runs_to_its_end_on_any_machine():
    found = run("--model", "tiny", "--tokens", "96", "--steps", "1")
    assert found["tokens_per_second"] == pytest.approx(96 / found["seconds"])


@pytest.mark.gpu
@pytest.mark.timeout(700)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_16384_tokens_of_the_real_shape_fit_into_24_gib():
    found = run("--tokens", "16384", "--steps", "3")
    print(json.dumps(found))
    assert found["allocated_gib"] < 24
