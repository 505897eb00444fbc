"""A push of weights is a transaction: what happens when one goes wrong, with a real vLLM."""

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engines import (
    TestEngine,
    largest_logprob_error,
    random_prompts,
    running_engine,
    served_model,
    worker_sums,
)
from megatron_grpo.rollout.engine import Engine
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.timing import PhaseTimer

NO_COMPLETE_WEIGHTS = "holds no complete weights"


@pytest.fixture(scope="module")
def pair_engine(tmp_path_factory, tied_model):
    """Two tensor-parallel workers, who answer one after the other."""
    logs = tmp_path_factory.mktemp("pair-logs")
    with running_engine("vllm", tied_model, logs, tensor_parallel_size=2) as engine:
        yield engine


def speak(engine: TestEngine, action) -> None:
    """Do one part of a push by hand."""

    async def connected() -> None:
        async with engine.client()._connect(engine.servers.base_urls[0]) as connection:
            await action(connection)

    asyncio.run(connected())


def corrupted(folder: Path, target: Path, tensor: str, row: int) -> Path:
    """A copy of `folder` with one bit flipped in one row of a tensor."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    content = bytearray(file.read_bytes())
    header_size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + header_size])[tensor]
    content[8 + header_size + entry["data_offsets"][0] + row * entry["shape"][1] * 4] ^= 1
    file.write_bytes(content)
    return target


def check_usable(engine: TestEngine, folder: Path) -> None:
    engine.push(folder)
    assert largest_logprob_error(folder, engine.generate(random_prompts(2))) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("row", "worker"), [(0, 0), (95, 1)])
def test_one_flipped_bit_names_worker_and_parameter_and_nothing_is_served(
    pair_engine, tied_model, tmp_path, row, worker
):
    bad = corrupted(tied_model, tmp_path / "bad", "model.layers.1.mlp.up_proj.weight", row)
    url = pair_engine.servers.base_urls[0]
    with pytest.raises(EngineError) as failure:
        pair_engine.push(bad, expected=tied_model)
    assert str(failure.value).splitlines()[1:] == [
        f"  rollout engine {url} worker {worker}: 1 of 18 parameters hold other values than were "
        "pushed: model.layers.1.mlp.gate_up_proj.weight"
    ]
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        pair_engine.generate(random_prompts(1))
    check_usable(pair_engine, tied_model)


@pytest.mark.slow
def test_all_workers_that_cannot_load_are_named_and_can_be_pushed_to_again(
    pair_engine, tied_model, tmp_path
):
    shutil.copytree(tied_model, tmp_path / "bad")
    weights = load_file(tied_model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(EngineError) as failure:
        pair_engine.push(tmp_path / "bad", expected=tied_model)
    for worker in range(2):
        assert f"worker {worker}: {tmp_path / 'bad'} has no weights for" in str(failure.value)
    check_usable(pair_engine, tied_model)


@pytest.mark.slow
def test_after_a_trainer_that_died_in_mid_push_the_next_one_pushes(pair_engine, tied_model):
    async def begin_only(engine: Engine) -> None:
        await engine.pause()
        await engine.ask("begin_push", push="5-dead")
        await engine.post("/start_weight_update")

    async def load_only(engine: Engine) -> None:
        await engine.load_weights(tied_model, "6-dead")

    for part in (begin_only, load_only):
        speak(pair_engine, part)
        with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
            pair_engine.generate(random_prompts(1))
        check_usable(pair_engine, tied_model)


@pytest.mark.slow
def test_workers_that_are_out_of_step_are_noticed(pair_engine, tied_model):
    # Last of this engine: vLLM leaves the second worker's answer to a failed call unread.
    async def fail_in_both(engine: Engine) -> None:
        with pytest.raises(EngineError, match="without a matching start"):
            await engine.post("/finish_weight_update", {"weight_version": "9"})

    speak(pair_engine, fail_in_both)
    with pytest.raises(EngineError, match="without a matching start"):
        pair_engine.push(tied_model)
    with pytest.raises(EngineError, match="restart it"):
        pair_engine.push(tied_model)


def test_whoever_began_first_of_two_pushes_is_told(vllm_engine, tied_model, tmp_path):
    other = served_model(tmp_path, "qwen3", tied=True, seed=1)
    client, timer = vllm_engine.client(), PhaseTimer()

    async def load_only(engine: Engine) -> None:
        await engine.load_weights(tied_model, "5-first")

    async def finish_late(engine: Engine) -> None:
        await engine.post("/start_weight_update")
        await engine.finish_push(5)
        await engine.post("/resume")

    speak(vllm_engine, load_only)
    client.update_weights(other, 6, worker_sums(other, vllm_engine.rollout), timer)
    with pytest.raises(EngineError, match="version 6, version 5 was asked for"):
        vllm_engine.generate(random_prompts(1), policy_version=5)

    # The first one's last words, after the second has begun, make nothing of it usable.
    async def begin_second(engine: Engine) -> None:
        await engine.pause()
        await engine.ask("begin_push", push="7-second")

    speak(vllm_engine, begin_second)
    speak(vllm_engine, finish_late)
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        vllm_engine.generate(random_prompts(1), policy_version=5)
    check_usable(vllm_engine, tied_model)


def test_of_pushes_that_race_no_mixture_is_served(vllm_engine, tied_model, tmp_path):
    folders = [tied_model, served_model(tmp_path, "qwen3", tied=True, seed=1)]
    sums = [worker_sums(folder, vllm_engine.rollout) for folder in folders]
    start = threading.Barrier(2)

    def push_and_generate(which: int) -> str:
        start.wait()
        outcomes = ""
        for attempt in range(4):
            version = 100 + 10 * attempt + which
            try:
                vllm_engine.client().update_weights(
                    folders[which], version, sums[which], PhaseTimer()
                )
                samples = vllm_engine.generate(random_prompts(2), policy_version=version)
            except EngineError:
                outcomes += "-"
            else:
                assert largest_logprob_error(folders[which], samples) < 1e-4
                outcomes += "+"
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(push_and_generate, range(2)))
    assert "-" in "".join(outcomes), outcomes
    check_usable(vllm_engine, tied_model)


def test_an_engine_that_starts_holds_no_version_and_one_killed_in_mid_push_is_named(
    tied_model, tmp_path
):
    with running_engine("vllm", tied_model, tmp_path) as engine:
        with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
            engine.generate(random_prompts(1), policy_version=0)
        [process] = (running.process for running in engine.servers._engines)
        os.kill(process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(engine.push, tied_model)
            time.sleep(1)
            assert not push.done()
            process.kill()
            killed_at = time.monotonic()
            with pytest.raises(ConnectionError, match=engine.servers.base_urls[0]):
                push.result()
        assert time.monotonic() - killed_at < 5
        with pytest.raises(EngineError, match="ended with signal SIGKILL"):
            engine.servers.check()
