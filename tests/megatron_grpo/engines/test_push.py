"""A push of weights is a transaction: what happens when one goes wrong, with a real vLLM."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.engines import (
    TestEngine,
    largest_logprob_error,
    random_prompts,
    running_engine,
    served_model,
)
from helpers.pushes import push_whole, rollout_overrides
from helpers.ranks import CONTEXT, run_ranks
from megatron_grpo.engines.http import EngineError
from parallel.weight_transfer.local_channels import LocalChannel

NO_COMPLETE_WEIGHTS = "holds no complete weights"


@pytest.fixture(scope="module")
def models(tied_model, tmp_path_factory):
    """Two models with different weights: whichever an engine holds, the other one is new to it."""
    folder = tmp_path_factory.mktemp("other")
    return [served_model(folder, "qwen3", tied=True, seed=1), tied_model]


def overrides(engine: TestEngine) -> list[str]:
    return rollout_overrides(engine.rollout, engine.servers.base_urls)


def check_usable(engine: TestEngine, models: Sequence[Path]) -> None:
    for folder in models:
        engine.push(folder)
        assert largest_logprob_error(folder, engine.generate(random_prompts(2))) < 1e-4


def push_and_stop(folder: Path, token: str, overrides: list[str], reached: Event) -> None:
    """A trainer of one rank that fills the first buffer of a push and goes no further."""
    pause_at_first_buffer(reached, CONTEXT.Event())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    push_whole(0, folder, token, overrides, 1)


def pause_at_first_buffer(reached: Event, proceed: Event) -> None:
    send_bucket = LocalChannel.send_bucket

    def pause(self: LocalChannel, num_bytes: int) -> None:
        reached.set()
        proceed.wait(60)
        send_bucket(self, num_bytes)

    LocalChannel.send_bucket = pause


def test_of_pushes_that_race_no_mixture_is_served(vllm_engine, models):
    engine = vllm_engine
    start = threading.Barrier(2)
    errors = []

    def push_and_generate(which: int) -> None:
        start.wait()
        for attempt in range(3):
            version = 100 + 10 * attempt + which
            arguments = (models[which], engine.servers.token, overrides(engine), version)
            [(error, _)] = run_ranks(1, push_whole, *arguments)
            with suppress(EngineError):  # the other one was in the way
                if not error:
                    samples = engine.generate(random_prompts(2), policy_version=version)
                    errors.append(largest_logprob_error(models[which], samples))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(push_and_generate, range(2)))
    # Nobody is in the way of whoever begins last.
    assert errors and max(errors) < 1e-4
    check_usable(engine, models)


def test_a_trainer_killed_in_mid_push_leaves_an_engine_that_serves_nothing_and_can_be_pushed_to(
    vllm_engine, models, tied_model
):
    reached = CONTEXT.Event()
    arguments = (tied_model, vllm_engine.servers.token, overrides(vllm_engine), reached)
    trainer = CONTEXT.Process(target=push_and_stop, args=arguments)
    trainer.start()
    try:
        assert reached.wait(60)
    finally:
        trainer.kill()
        trainer.join()
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        vllm_engine.generate(random_prompts(1))
    check_usable(vllm_engine, models)


def push_in_two_parts(
    rank: int, folder: Path, token: str, overrides: list[str], reached: Event, proceed: Event
) -> tuple[str, list[str]]:
    """Like `push_whole`, with a pause before the first buffer is handed over."""
    pause_at_first_buffer(reached, proceed)
    return push_whole(rank, folder, token, overrides, 1)


def test_an_engine_that_starts_holds_no_version_and_one_killed_in_mid_push_is_named(
    tied_model, tmp_path
):
    with running_engine("vllm", tied_model, tmp_path) as engine, ThreadPoolExecutor(1) as pool:
        with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
            engine.generate(random_prompts(1), policy_version=0)
        start, reached, proceed = time.monotonic(), CONTEXT.Event(), CONTEXT.Event()
        arguments = (tied_model, engine.servers.token, overrides(engine), reached, proceed)
        push = pool.submit(run_ranks, 1, push_in_two_parts, *arguments)
        assert reached.wait(60)  # the workers wait for the first buffer
        engine.servers._engines[0].process.kill()
        proceed.set()
        [(error, _)] = push.result()
        assert engine.servers.base_urls[0] in error
        assert time.monotonic() - start < 45  # and not the 60 s for which a channel may stand still
        with pytest.raises(EngineError, match="ended with signal SIGKILL"):
            engine.servers.check()


@pytest.mark.slow
def test_workers_that_are_out_of_step_are_noticed(tied_model, tmp_path):
    async def fail_in_both(url: str) -> None:
        async with engine.client()._connect(url) as connection:
            with pytest.raises(EngineError, match="without a matching start"):
                await connection.post("/finish_weight_update", {"weight_version": "9"})

    # vLLM leaves the second worker's answer to a failed call unread.
    with running_engine("vllm", tied_model, tmp_path, tensor_parallel_size=2) as engine:
        asyncio.run(fail_in_both(engine.servers.base_urls[0]))
        with pytest.raises(EngineError, match=r"without a matching start|restart it"):
            engine.push(tied_model)
        with pytest.raises(EngineError, match="restart it"):
            engine.push(tied_model)
