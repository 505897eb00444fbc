"""Engines that die, hang or come back while a trainer continues: with real servers.

The reference engine samples a prompt alike on every engine: a disturbed generation must equal an
undisturbed one, sample for sample.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import psutil
import pytest

from helpers.engines.live import largest_logprob_error, random_prompts, running_engine, wait_until
from helpers.engines.sampling import generate
from helpers.engines.scripted import URL, NoServers
from helpers.pushes.trainers import Trainer, as_soon_as, trainer
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted, is_healthy
from megatron_grpo.engines.pool import MAX_COMEBACKS, EnginePool
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.launch.process import Preempted
from megatron_grpo.launch.run_dir import bearer, new_token
from parallel.weight_transfer.local_channels import LocalChannel

pytestmark = [pytest.mark.engines, pytest.mark.timed]

PROMPTS = random_prompts(24)


@pytest.fixture(scope="module")
def undisturbed(pair):
    """The completion ids that undisturbed engines generate for `PROMPTS`."""
    return tokens_of(pair.generate(PROMPTS))


def tokens_of(samples) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(s.prompt.index, s.sample_index, tuple(s.completion_ids)) for s in samples]


def bring_back(ours: Trainer) -> None:
    """Wait for engines that were started again, and push to all."""
    assert wait_until(lambda: all(map(is_healthy, ours.servers.base_urls)), seconds=60)
    ours.push()
    assert [*ours.pool.serving] == [*ours.servers.base_urls]
    generation = ours.ask(PROMPTS)
    generate(ours.client, generation)
    assert generation.engines == {*ours.servers.base_urls}


def kill(ours: Trainer, url: str) -> None:
    os.kill(ours.pid(url), signal.SIGKILL)


def test_generate_survives_a_killed_engine(pair, undisturbed, capfd):
    first, second = pair.servers.base_urls
    generation = pair.ask(PROMPTS)
    with as_soon_as(lambda: second in generation.engines, lambda: kill(pair, second)):
        samples = generate(pair.client, generation)
    assert tokens_of(samples) == undisturbed
    assert {s.policy_version for s in samples} == {pair.version}
    assert [*pair.pool.serving] == [first]
    pair.generate(PROMPTS[:2])  # nobody waits for the other one
    bring_back(pair)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        f"rollout engine {second} is lost: ended with signal SIGKILL; it is being restarted",
        f"rollout engine {second} is back",
    ]


@pytest.mark.slow
def test_generate_survives_a_stopped_engine(pair, undisturbed, capfd):
    first, second = pair.servers.base_urls
    stopped = psutil.Process(pair.pid(first))
    generation = pair.ask(PROMPTS)
    with as_soon_as(lambda: first in generation.engines, stopped.suspend):
        samples = generate(pair.client, generation)
    assert tokens_of(samples) == undisturbed
    assert not is_alive(stopped) and [*pair.pool.serving] == [second]
    assert f"{first} is lost: did not answer within 3 s" in capfd.readouterr().err
    bring_back(pair)


def test_push_may_last_longer_than_engines_may_stall(pair, monkeypatch, capfd):
    send_bucket, delays = LocalChannel.send_bucket, [4.5]

    def slow(self: LocalChannel, num_bytes: int) -> None:
        while delays:
            time.sleep(delays.pop())
        send_bucket(self, num_bytes)

    monkeypatch.setattr(LocalChannel, "send_bucket", slow)
    monkeypatch.setattr(engine_module, "PROBE_INTERVAL", 0.1)
    pair.push()
    assert not delays and [*pair.pool.serving] == [*pair.servers.base_urls]
    assert "is lost" not in capfd.readouterr().err


def test_push_goes_on_without_an_engine_that_dies(pair, undisturbed, monkeypatch):
    first, second = pair.servers.base_urls
    send_bucket, victims = LocalChannel.send_bucket, [first]

    def dying(self: LocalChannel, num_bytes: int) -> None:
        while victims:
            kill(pair, victims.pop())
        send_bucket(self, num_bytes)

    monkeypatch.setattr(LocalChannel, "send_bucket", dying)
    pair.push()
    assert not victims and [*pair.pool.serving] == [second]
    generation = pair.ask(PROMPTS)
    with (
        as_soon_as(lambda: generation.num_open < 2 * len(PROMPTS), lambda: kill(pair, second)),
        pytest.raises(NoServingEngine, match="ended with signal SIGKILL"),
    ):
        generate(pair.client, generation)
    assert generation.num_open > 0  # answered requests stay answered
    pair.push_again()
    assert tokens_of(generate(pair.client, generation)) == undisturbed
    bring_back(pair)


def test_pool_leaves_out_an_engine_without_weights(pair, undisturbed, capfd):
    first, second = pair.servers.base_urls
    pids = [pair.pid(url) for url in (first, second)]
    channels = {"transfer": {}, "engine": 0, "channels": "another's"}
    call = {"kwargs": {"call": "open_channels", "question": "", **channels}}
    httpx.post(f"{second}/collective_rpc", json=call, headers=bearer(pair.servers.token))
    assert tokens_of(pair.generate(PROMPTS)) == undisturbed
    assert [*pair.pool.serving] == [first]
    assert f"{second} is out until the next push: holds no complete" in capfd.readouterr().err
    bring_back(pair)
    assert [pair.pid(url) for url in (first, second)] == pids


def test_push_gives_up_an_engine_that_dies_as_it_starts(tied_model, tmp_path, capfd):
    """The message says how each engine ended, with the error in its log."""
    rollout = RolloutConfig(max_completion_length=16)
    with closing(EngineServers(ModelConfig(path=tied_model), rollout, tmp_path, None)) as servers:
        [engine] = servers.processes.values()
        broken = [sys.executable, "-c", "raise MemoryError('planted')"]
        servers.processes[engine.url] = replace(engine, command=broken)
        engine.process.kill()
        with (
            trainer(tied_model, servers, rollout) as ours,
            pytest.raises(RolloutAborted) as lost,
        ):
            ours.push()
    lines = str(lost.value).splitlines()
    log = tmp_path / "engine_0.log"
    assert lines[1] == f"rollout engine {engine.url} ended with exit code 1; {log} ends with"
    assert lines[2] == "MemoryError: planted"
    assert log.read_text().count("MemoryError: planted") == MAX_COMEBACKS
    assert f"it came back {MAX_COMEBACKS} times and is given up" in capfd.readouterr().err


@pytest.mark.parametrize("is_asked_to_end", [False, True])
def test_push_waits_for_an_engine_as_long_as_it_may(is_asked_to_end, tied_model, tmp_path):
    with reserve_port() as unheard:
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        seconds = 60.0 if is_asked_to_end else 0.5
        rollout = RolloutConfig(base_urls=(url,), startup_timeout=seconds, max_completion_length=16)
        servers = EngineServers(ModelConfig(path=tied_model), rollout, tmp_path, new_token())
        with trainer(tied_model, servers, rollout) as ours:
            if is_asked_to_end:
                with (
                    as_soon_as(lambda: not ours.pool.up, ours.client.cancel),
                    pytest.raises(Preempted),
                ):
                    ours.push()
            else:
                error = f"no rollout engine serves .*\n.*{url} did not answer"
                with pytest.raises(RolloutAborted, match=error):
                    ours.push()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "refuses the token in MEGATRON_GRPO_TOKEN"),
        (404, "answered /collective_rpc with 404"),
    ],
)
def test_push_survives_a_stranger_at_a_lost_address(
    status, reason, reference_engine, tied_model, tmp_path, capfd
):
    """For example the engine itself, started again with another token, or another server."""
    [well] = reference_engine.servers.base_urls
    with reserve_port() as unheard:
        port = unheard.getsockname()[1]
        lost = f"http://127.0.0.1:{port}"
        rollout = RolloutConfig(base_urls=(well, lost), max_completion_length=16)
        token = reference_engine.servers.token
        servers = EngineServers(ModelConfig(path=tied_model), rollout, tmp_path, token)
        with trainer(tied_model, servers, rollout) as ours:
            ours.push()
            assert [*ours.pool.serving] == [well]
            with stranger(port, status):
                ours.push()
                assert [*ours.pool.serving] == [well]
                assert len(ours.generate(PROMPTS)) == 2 * len(PROMPTS)
    assert f"{lost} is lost: {reason}" in capfd.readouterr().err


@contextmanager
def stranger(port: int, status: int) -> Iterator[None]:
    """A server that reports to be healthy and refuses everything else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else status)
            self.end_headers()

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield
        finally:
            server.shutdown()


def pool_of(servers: NoServers, startup_timeout: float = 60.0) -> EnginePool:
    return EnginePool(
        servers, RolloutConfig(startup_timeout=startup_timeout, max_completion_length=16)
    )


def test_pool_forgives_losses_between_whole_generations():
    pool = pool_of(NoServers(are_ours=True))
    for _ in range(MAX_COMEBACKS + 2):
        pool.mark_dead(URL, "died")
        pool.raise_if_all_dead(math.inf)
        pool.mark_recovered(URL)
        pool.finish_push([URL])
        pool.finish_generation()


@pytest.mark.parametrize(
    ("startup_timeout", "are_ours", "num_losses"),
    [(60, True, 1), (1e-9, True, 2), (1e-9, False, 1)],
)
def test_check_engines_starts_a_late_engine_once_more(startup_timeout, are_ours, num_losses, capfd):
    pool = pool_of(NoServers(are_ours), startup_timeout)
    pool.mark_dead(URL, "died")
    assert not pool.check_engines()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == num_losses and all(f"{URL} is lost: " in line for line in lines)
    assert num_losses == 1 or "within 1e-09 s of its start (rollout.startup_timeout)" in lines[1]


@pytest.mark.slow
def test_push_waits_for_an_engine_given_by_address(tied_model, tmp_path, capfd):
    with running_engine("reference", tied_model, tmp_path / "other") as other:
        [url] = other.servers.base_urls
        with (
            running_engine(
                "vllm", tied_model, tmp_path, other.servers.token, base_urls=(url,)
            ) as given,
            trainer(tied_model, given.servers, given.rollout) as ours,
        ):
            ours.push()
            before = ours.generate(PROMPTS)
            other.servers.kill(url)
            with pytest.raises(NoServingEngine, match=f"{url} cannot be reached"):
                ours.generate(PROMPTS)
            other.servers.restart(url)
            ours.push_again()
            assert ours.generate(PROMPTS) == before
    assert f"rollout engine {url} is back" in capfd.readouterr().err


@pytest.fixture(params=["live_engine", pytest.param("reference_engine", marks=pytest.mark.slow)])
def shared_engine(request):
    """An engine given by address, which several runs use in turn."""
    return request.getfixturevalue(request.param)


def test_cancel_leaves_an_engine_for_the_next_run(shared_engine, tied_model, seeds):
    url = shared_engine.servers.base_urls[0]

    def load() -> int:
        """Number of requests that the engine is processing."""
        headers = bearer(shared_engine.servers.token)
        return httpx.get(f"{url}/load", headers=headers).json()["server_load"]

    shared_engine.push(tied_model)
    expected = tokens_of(shared_engine.generate(PROMPTS))
    before = load()  # vLLM may still count cancelled requests
    with trainer(tied_model, shared_engine.servers, shared_engine.rollout) as ours:
        ours.push()
        generation = ours.ask(random_prompts(50), num_generations=4, max_completion_length=64)
        # Half of them: a busy machine may miss the moment at which all are there.
        many = before + 100
        with (
            as_soon_as(lambda: load() >= many, ours.client.cancel),
            pytest.raises(Preempted),
        ):
            generate(ours.client, generation)
    assert is_healthy(url)
    shared_engine.push(tied_model)
    assert tokens_of(shared_engine.generate(PROMPTS)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (psutil.Process.suspend, "made no progress for 3 s"),  # its server answers probes
        (psutil.Process.kill, r"(answered \S+ with 50[03]|cannot be reached)"),
    ],
)
def test_pool_kills_a_vllm_whose_core_stops_or_dies(fault, error, tied_model, tmp_path):
    """The run starts it again, with the current weights."""
    with running_engine("vllm", tied_model, tmp_path, stall_timeout=3.0) as engine:
        [url] = engine.servers.base_urls
        with trainer(tied_model, engine.servers, engine.rollout) as ours:
            ours.push()
            generation = ours.ask(random_prompts(300), num_generations=4)
            server = psutil.Process(ours.pid(url))
            processes = [server, *server.children(recursive=True)]
            [core] = [each for each in server.children() if "EngineCore" in each.name()]
            with (
                as_soon_as(lambda: generation.engines, partial(fault, core)),
                pytest.raises(NoServingEngine, match=f"{url} {error}"),
            ):
                generate(ours.client, generation)
            assert not any(map(is_alive, processes))
            assert 0 < generation.num_open < 4 * 300
            ours.push_again()
            samples = generate(ours.client, generation)
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (prompt, sample) for prompt in range(300) for sample in range(4)
    ]
    assert largest_logprob_error(tied_model, samples[::100]) < 1e-4


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
