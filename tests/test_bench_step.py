"""The benchmark of a step runs on any machine; see `gpu/test_gpu_bench.py`."""

import pytest

from tests.gpu.test_gpu_bench import run


@pytest.mark.slow
def test_bench_step_runs_with_a_tiny_model():
    found = run("--model", "tiny", "--tokens", "96", "--steps", "1")
    assert found["tokens_per_second"] == pytest.approx(96 / found["seconds"])
