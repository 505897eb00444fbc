"""An SGLang that loses its memory asleep; in tests/megatron_grpo/engines/test_sleep.py engines keep
it, as on CPUs."""

import os
import subprocess

import pytest

from helpers.engines.live import (
    SGLANG_PYTHON,
    largest_logprob_error,
    random_prompts,
    running_engine,
    served_model,
)
from helpers.engines.sglang_sums import pose_as

SLEEP_REQUESTS = """
import asyncio
from types import SimpleNamespace
from fastapi import HTTPException
from megatron_grpo.engines.sglang import server

class Manager:
    abort_request = lambda self, abort_all: None

async def busy():
    return {"success": False}

async def pushed():
    await server.gate.close(cut=False)
    return {"success": True}

server.manager, server.DRAIN_SECONDS = Manager, 0
server.get_parallel = lambda: SimpleNamespace(num_dp_ranks=1)
for server.reset_prefix_cache in (busy, pushed):
    try:
        asyncio.run(server.sleep())
    except HTTPException as error:
        print(error.status_code, error.detail)
"""
"""Nothing releases memory here: an accepted request would end in an AttributeError."""


@pytest.mark.long  # SGLang is imported
def test_sleep_is_refused_during_requests_or_a_push():
    command = [SGLANG_PYTHON, "-P", "-c", SLEEP_REQUESTS]
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert finished.stdout.splitlines()[-2:] == [
        "503 aborted requests have not ended",
        "503 paused or resumed meanwhile",
    ]


@pytest.mark.long
def test_push_brings_back_all_that_sleep_lost(monkeypatch, tmp_path):
    pose_as(monkeypatch, "forgetful")
    folder = served_model(tmp_path / "model", "gemma3_text", tied=True)
    options = {"python": SGLANG_PYTHON, "enable_sleep_mode": True}
    with running_engine("sglang", folder, tmp_path / "logs", **options) as engine:
        for _ in range(2):
            engine.push(folder)
            samples = engine.generate(random_prompts(4))
            assert largest_logprob_error(folder, samples) < 1e-4
            engine.client(enable_sleep_mode=True).sleep()
