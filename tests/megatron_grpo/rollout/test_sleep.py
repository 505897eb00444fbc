"""Engines that sleep between generations: the requests, with a real vLLM.

A CPU engine answers all of them and keeps its memory; tests/gpu has the memory.
"""

from pathlib import Path

import httpx
import pytest

from engines import TestEngine, largest_logprob_error, random_prompts, served_model
from megatron_grpo.launch.job_token import bearer
from megatron_grpo.rollout import EnginesOut
from pushes import client_of, push_folder


def is_asleep(engine: TestEngine) -> bool:
    url = f"{engine.servers.base_urls[0]}/is_sleeping"
    answer: bool = httpx.get(url, headers=bearer(engine.servers.token)).json()["is_sleeping"]
    return answer


def push_to_sleeping(engine: TestEngine, folder: Path) -> None:
    engine.version += 1
    rollout = engine.rollout.model_copy(update={"enable_sleep_mode": True})
    push_folder(folder, rollout, engine.servers.base_urls, engine.servers.token, engine.version)


def test_an_engine_that_sleeps_has_no_weights_until_a_push_wakes_it(
    vllm_engine: TestEngine, tied_model: Path, tmp_path: Path
) -> None:
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    vllm_engine.push(tied_model)
    client = vllm_engine.client(enable_sleep_mode=True)
    client.sleep()
    assert is_asleep(vllm_engine) and client.fleet.serving == []
    with pytest.raises(EnginesOut, match="holds no complete weights"):
        vllm_engine.generate(random_prompts(1))
    for folder in (other, tied_model):  # the second push finds it awake
        push_to_sleeping(vllm_engine, folder)
        assert not is_asleep(vllm_engine)
        assert largest_logprob_error(folder, vllm_engine.generate(random_prompts(3))) < 1e-4


def test_sleeping_twice_is_sleeping_once(vllm_engine: TestEngine, tied_model: Path) -> None:
    vllm_engine.push(tied_model)
    client = vllm_engine.client(enable_sleep_mode=True)
    client.sleep()
    client.sleep()
    assert is_asleep(vllm_engine)
    push_to_sleeping(vllm_engine, tied_model)
    assert not is_asleep(vllm_engine)


def test_an_engine_that_dies_before_it_sleeps_keeps_no_other_awake(
    vllm_engine: TestEngine, tied_model: Path
) -> None:
    vllm_engine.push(tied_model)
    nobody = "http://127.0.0.1:9"  # the port of `discard`, where nothing listens
    urls = [nobody, vllm_engine.servers.base_urls[0]]
    client = client_of(urls, vllm_engine.servers.token, enable_sleep_mode=True)
    client.sleep()
    assert is_asleep(vllm_engine)
    assert list(client._failed) == [nobody]
    push_to_sleeping(vllm_engine, tied_model)
