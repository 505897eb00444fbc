"""A push of weights is a transaction: what happens when one goes wrong, with a real engine."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from helpers.engines.live import (
    TestEngine,
    largest_logprob_error,
    random_prompts,
    running_engine,
)
from helpers.pushes.policies import push_whole, rollout_overrides
from helpers.ranks.processes import CONTEXT, run_ranks
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.http import EngineError
from parallel.weight_transfer.local_channels import LocalChannel

pytestmark = [pytest.mark.engines, pytest.mark.both_engines]

NO_COMPLETE_WEIGHTS = "holds no complete weights"
# Above every version that the tests, which share an engine, have pushed.
LATE = 1000


@pytest.fixture
def models(tied_model, other_model):
    """Two models with different weights: one is always new to the engine."""
    return [other_model, tied_model]


@pytest.fixture(scope="module")
def pair_engine(engine_kind, tmp_path_factory, tied_model):
    """An engine of two tensor-parallel workers."""
    logs = tmp_path_factory.mktemp("pair-logs")
    pair = {**engine_kind, "tensor_parallel_size": 2}
    with running_engine(folder=tied_model, log_dir=logs, **pair) as engine:
        yield engine


def speak(engine: TestEngine, action) -> None:
    """Do one part of a push by hand."""

    client = engine.client()

    async def connected() -> None:
        await action(client.engine(engine.servers.base_urls[0]))

    client.loop.call(connected())
    client.close()


async def begin_by_hand(engine: Engine, push: str) -> None:
    """Begin a push like a trainer that then stops; its channels have no peer."""
    await engine.open_channels({}, 0, channels=push)
    await engine.begin_push(push, channels=push)


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


def push_in_two_parts(
    rank: int, folder: Path, token: str, overrides: list[str], reached: Event, proceed: Event
) -> tuple[str, list[str]]:
    """Like `push_whole`, with a pause before the first buffer is handed over."""
    pause_at_first_buffer(reached, proceed)
    return push_whole(rank, folder, token, overrides, 1)


def pause_at_first_buffer(reached: Event, proceed: Event) -> None:
    send_bucket = LocalChannel.send_bucket

    def pause(self: LocalChannel, num_bytes: int) -> None:
        reached.set()
        proceed.wait(60)
        send_bucket(self, num_bytes)

    LocalChannel.send_bucket = pause


def push_error(engine: TestEngine, folder: Path, meanwhile: Callable[[], None]) -> str:
    """Push, do `meanwhile` when the workers wait for the first buffer, and return the error."""
    reached, proceed = CONTEXT.Event(), CONTEXT.Event()
    arguments = (folder, engine.servers.token, overrides(engine), reached, proceed)
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(run_ranks, 1, push_in_two_parts, *arguments)
        assert reached.wait(60)
        meanwhile()
        proceed.set()
        [(error, _)] = push.result()
    return error


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "network"])
def test_flipped_bits_name_workers_and_parameters_and_nothing_is_served(
    pair_engine, models, tied_model, transport
):
    [url] = pair_engine.servers.base_urls
    arguments = [*overrides(pair_engine), f"rollout.weight_transport={transport}"]
    # Flips a bit of the first buffer to each of the two workers, at both attempts.
    token = pair_engine.servers.token
    [(error, _)] = run_ranks(1, push_whole, tied_model, token, arguments, 1, 4)
    faults = error.splitlines()[1:]
    for worker, fault in enumerate(faults):
        assert fault.startswith(
            f"  rollout engine {url} worker {worker}: 1 of 18 parameters differ from what "
            "was pushed: model."
        )
    assert len(faults) == 2
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        pair_engine.generate(random_prompts(1))
    check_usable(pair_engine, models)


@pytest.mark.slow
def test_a_trainer_pushes_after_another_died_between_the_steps_of_a_push(pair_engine, models):
    async def begin_only(engine: Engine) -> None:
        await begin_by_hand(engine, "5-dead")

    async def receive_only(engine: Engine) -> None:
        await begin_by_hand(engine, "6-dead")
        await engine.ask_workers("receive_push", push="6-dead")

    for part in (begin_only, receive_only):
        speak(pair_engine, part)
        with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
            pair_engine.generate(random_prompts(1))
        check_usable(pair_engine, models)


def test_the_first_of_two_pushes_is_refused(live_engine, models):
    async def begin_first(engine: Engine) -> None:
        await begin_by_hand(engine, f"{LATE}-first")

    async def finish_late(engine: Engine) -> None:
        await engine.begin_push(f"{LATE}-again", channels=f"{LATE}-first")
        await engine.ask_workers("receive_push", push=f"{LATE}-again")
        await engine.ask_workers("receive_push", push=f"{LATE}-first")
        await engine.finish_push(f"{LATE}-first", LATE)
        await engine.post("/resume")

    speak(live_engine, begin_first)
    version = live_engine.push(models[0])
    with pytest.raises(EngineError, match=f"version {version}, but version {LATE} was requested"):
        live_engine.generate(random_prompts(1), policy_version=LATE)

    # Late messages of the first trainer must not make its push usable.
    async def begin_second(engine: Engine) -> None:
        await begin_by_hand(engine, "7-second")

    speak(live_engine, begin_second)
    speak(live_engine, finish_late)
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        live_engine.generate(random_prompts(1), policy_version=LATE)
    check_usable(live_engine, models)


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["live_engine", "pair_engine"])
def test_no_mixture_of_racing_pushes_is_served(request, engine_name, models):
    engine = request.getfixturevalue(engine_name)
    start = threading.Barrier(2)
    errors = []

    def push_and_generate(which: int) -> None:
        start.wait()
        for attempt in range(3):
            version = 100 + 10 * attempt + which
            arguments = (models[which], engine.servers.token, overrides(engine), version)
            [(error, _)] = run_ranks(1, push_whole, *arguments)
            with suppress(EngineError):  # the other push was in the way
                if not error:
                    samples = engine.generate(random_prompts(2), policy_version=version)
                    errors.append(largest_logprob_error(models[which], samples))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(push_and_generate, range(2)))
    # Nothing disturbs the trainer that begins last.
    assert errors and max(errors) < 1e-4
    check_usable(engine, models)


def test_a_trainer_killed_in_mid_push_leaves_an_engine_that_serves_nothing_and_can_be_pushed_to(
    live_engine, models, tied_model
):
    reached = CONTEXT.Event()
    arguments = (tied_model, live_engine.servers.token, overrides(live_engine), reached)
    trainer = CONTEXT.Process(target=push_and_stop, args=arguments)
    trainer.start()
    try:
        assert reached.wait(60)
    finally:
        trainer.kill()
        trainer.join()
    with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
        live_engine.generate(random_prompts(1))
    check_usable(live_engine, models)


@pytest.mark.slow
def test_workers_that_are_out_of_step_are_noticed(pair_engine, tied_model):
    if pair_engine.rollout.engine != "vllm":
        pytest.skip("others ask their workers in another way")

    # Last test of this engine: vLLM leaves the second worker's answer to a failed call unread.
    async def fail_in_both(engine: Engine) -> None:
        with pytest.raises(EngineError, match="no_such_call"):
            await engine.ask_workers("no_such_call")

    speak(pair_engine, fail_in_both)
    with pytest.raises(EngineError, match=r"no_such_call|restart it"):
        pair_engine.push(tied_model)
    with pytest.raises(EngineError, match="restart it"):
        pair_engine.push(tied_model)


@pytest.mark.slow
def test_a_worker_killed_in_mid_push_is_named(engine_kind, tied_model, tmp_path):
    pair = {**engine_kind, "tensor_parallel_size": 2}
    with running_engine(folder=tied_model, log_dir=tmp_path, **pair) as engine:
        [server] = (running.process for running in engine.servers.processes.values())
        workers = [
            process
            for process in psutil.Process(server.pid).children(recursive=True)
            if "Worker" in process.name()
            or "Worker" in " ".join(process.cmdline())
            or "scheduler" in process.name()
        ]
        error = push_error(engine, tied_model, workers[-1].kill)
        assert engine.servers.base_urls[0] in error


@pytest.mark.slow
def test_an_engine_that_starts_holds_no_version_and_one_killed_in_mid_push_is_named(
    engine_kind, tied_model, tmp_path
):
    with running_engine(folder=tied_model, log_dir=tmp_path, **engine_kind) as engine:
        with pytest.raises(EngineError, match=NO_COMPLETE_WEIGHTS):
            engine.generate(random_prompts(1), policy_version=0)
        [process] = (running.process for running in engine.servers.processes.values())
        start = time.monotonic()
        error = push_error(engine, tied_model, process.kill)
        assert engine.servers.base_urls[0] in error
        assert time.monotonic() - start < 45  # not the channel's time-out of 60 s
        with pytest.raises(EngineError, match="ended with signal SIGKILL"):
            engine.servers.check()
