"""Engines that sleep between generations: the requests, with a real engine.

A CPU engine answers all of them and keeps its memory; tests/gpu has the memory.
"""

import os
import signal
from pathlib import Path

import httpx
import pytest

from helpers.engines.live import largest_logprob_error, random_prompts, running_engine
from helpers.pushes.policies import client_of, push_folder
from helpers.pushes.trainers import trainer
from megatron_grpo.engines.http import NoServingEngine
from megatron_grpo.launch.run_dir import bearer

pytestmark = pytest.mark.engines


def is_asleep(engine) -> bool:
    url = f"{engine.servers.base_urls[0]}/is_sleeping"
    answer: bool = httpx.get(url, headers=bearer(engine.servers.token)).json()["is_sleeping"]
    return answer


def push_to_sleeping(engine, folder: Path) -> None:
    engine.version += 1
    rollout = engine.rollout.model_copy(update={"enable_sleep_mode": True})
    push_folder(folder, rollout, engine.servers.base_urls, engine.servers.token, engine.version)


def test_an_engine_that_sleeps_has_no_weights_until_a_push_wakes_it(
    live_engine, tied_model, other_model
) -> None:
    live_engine.push(tied_model)
    client = live_engine.client(enable_sleep_mode=True)
    client.sleep()
    client.sleep()  # no effect
    assert is_asleep(live_engine) and [*client.pool.serving] == []
    with pytest.raises(NoServingEngine, match="holds no complete weights"):
        live_engine.generate(random_prompts(1))
    for folder in (other_model, tied_model):  # the second push finds it awake
        push_to_sleeping(live_engine, folder)
        assert not is_asleep(live_engine)
        assert largest_logprob_error(folder, live_engine.generate(random_prompts(3))) < 1e-4


def test_engines_that_do_not_sleep_are_lost_and_keep_no_other_awake(
    live_engine, reference_engine, tied_model
) -> None:
    live_engine.push(tied_model)
    nobody = "http://127.0.0.1:9"  # the port of `discard`, where nothing listens
    stranger, ours = (e.servers.base_urls[0] for e in (reference_engine, live_engine))
    token = live_engine.servers.token  # which the other engine refuses
    client = client_of([nobody, stranger, ours], token, enable_sleep_mode=True)
    client.sleep()
    assert is_asleep(live_engine)
    assert client.pool.up == {ours: 0}
    push_to_sleeping(live_engine, tied_model)


@pytest.mark.slow  # 25 s: an engine starts twice
def test_an_engine_that_died_is_back_and_asleep_before_the_trainer_has_the_memory(
    engine_kind, tied_model, tmp_path
) -> None:
    asleep = {"log_dir": tmp_path, "enable_sleep_mode": True}
    with (
        running_engine(folder=tied_model, **engine_kind, **asleep) as engine,
        trainer(tied_model, engine.servers, engine.rollout) as ours,
    ):
        ours.push()
        os.kill(ours.pid(engine.servers.base_urls[0]), signal.SIGKILL)
        ours.client.sleep()
        assert is_asleep(engine)
        ours.push()
        assert not is_asleep(engine)
        assert largest_logprob_error(tied_model, ours.generate(random_prompts(3))) < 1e-4


def test_a_run_without_sleep_mode_wakes_an_engine_that_was_left_asleep(
    live_engine, tied_model
) -> None:
    live_engine.push(tied_model)
    live_engine.client(enable_sleep_mode=True).sleep()
    live_engine.push(tied_model)
    assert not is_asleep(live_engine)
    samples = live_engine.generate(random_prompts(3))
    assert largest_logprob_error(tied_model, samples) < 1e-4
