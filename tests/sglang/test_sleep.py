"""An SGLang that sleeps and loses its memory: tests/megatron_grpo/engines/test_sleep.py has the
requests, of engines on CPUs, which keep theirs."""

import os
from pathlib import Path

import pytest

from helpers.engines import (
    SGLANG_PYTHON,
    largest_logprob_error,
    random_prompts,
    running_engine,
    served_model,
)
from megatron_grpo.engines.sglang import args


@pytest.mark.long
def test_a_push_brings_back_all_that_an_engine_lost_asleep(monkeypatch, tmp_path):
    monkeypatch.setattr(args, "SERVER", "helpers.sglang_forgetful")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    folder = served_model(tmp_path / "model", "qwen3", tied=True)
    options = {"python": SGLANG_PYTHON, "enable_sleep_mode": True}
    with running_engine("sglang", folder, tmp_path / "logs", **options) as engine:
        for _ in range(2):
            engine.push(folder)
            samples = engine.generate(random_prompts(4))
            assert largest_logprob_error(folder, samples) < 1e-4
            engine.client(enable_sleep_mode=True).sleep()
