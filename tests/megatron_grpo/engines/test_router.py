"""Completions that go on under new weights: with a real engine, and with scripted ones."""

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import aiohttp
import pytest
from transformers import AutoTokenizer

from helpers.engines.live import (
    largest_error_by_version,
    random_prompts,
    running_engine,
    samples_until,
    sampling_params,
    wait_until,
)
from helpers.engines.sampling import Completions, generate, routing
from helpers.engines.scripted import ScriptedClient, ScriptedEngine
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines import router as router_module
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.engine import GENERATE, Engine
from megatron_grpo.engines.http import EngineError, NoServingEngine
from megatron_grpo.engines.request import Request
from megatron_grpo.launch.process import Preempted

pytestmark = [pytest.mark.engines, pytest.mark.both_engines]

NUM_TOKENS = 300


@pytest.fixture
def decode(tied_model):
    return partial(AutoTokenizer.from_pretrained(tied_model).decode, skip_special_tokens=True)


@pytest.fixture
def router(live_engine, tied_model, decode):
    live_engine.push(tied_model)
    with routing(live_engine.client(), decode) as router:
        yield router


def generation(number, version, num_tokens=NUM_TOKENS, **settings):
    """Four samples of each of two prompts, without an end token."""
    defaults = {
        "num_generations": 4,
        "policy_version": version,
        "max_completion_length": num_tokens,
        "stop_token_ids": (),
        "series": number,
    }
    params = sampling_params(**defaults | settings)
    return Completions(random_prompts(2, seed=number), params, number)


@pytest.mark.long
def test_router_samples_each_token_by_its_version(live_engine, router, tied_model, other_model):
    weights = {live_engine.version: tied_model}

    def made_through_pushes():
        router.resume(live_engine.version)
        first, size = live_engine.num_generated(), {"num_tokens": 400, "num_generations": 8}
        asked = [generation(number, live_engine.version, **size) for number in range(2)]
        made = [router.submit(each) for each in asked]
        assert wait_until(lambda: live_engine.num_generated() >= first + 100, 120, 0.005)
        with router.aborted():  # as for a checkpoint
            parts = [sample for each in asked for sample in each.so_far()]
            assert CUT in {part.finish_reason for part in parts}
            assert all(part.completion_ids for part in parts)
        for num_flips, folder in enumerate((other_model, tied_model)):  # the second at two attempts
            weights[live_engine.push_in_flight(router, folder, 100, made, num_flips)] = folder
        for each in made:
            each.result(timeout=120)
        samples = [sample for each in asked for sample in each.samples()]
        assert len(samples) == 32
        return samples

    samples = samples_until(lambda sample: len(sample.spans) == 3, made_through_pushes)
    for sample in samples:
        assert sum(count for _, count in sample.spans) == len(sample.completion_ids) == 400
    checked = [sample for sample in samples if len(sample.spans) == 3][:8] + samples[::8]
    assert all(largest_error_by_version(weights, sample) < 1e-3 for sample in checked)


FEW = {"vllm": {"max_num_seqs": 1}, "sglang": {"max_running_requests": 1}}
"""Options of an engine that takes one request at a time, so that it is killed before it is done."""


@pytest.mark.long
def test_router_keeps_what_a_killed_engine_has_streamed(
    tied_model, other_model, tmp_path, engine_kind, decode, monkeypatch
):
    kept, take, check = {}, Request.take, Engine._check_tokens
    begun, killed, seen = threading.Event(), threading.Event(), set()

    def note(self, choice, url, decode):
        # Only the killed engine's: the other one is aborted if a push finds the loss.
        if choice.token_ids and choice.finish_reason == CUT and url == pair.servers.base_urls[0]:
            kept[self.priority] = choice
        take(self, choice, url, decode)

    def kill_after_a_push(self, choice, versions):
        check(self, choice, versions)
        if self.url != pair.servers.base_urls[0] or killed.is_set():
            return
        begun.set()
        if choice.finish_reason == CUT and len(choice.weight_versions) == 2:
            os.kill(pair.servers.processes[self.url].process.pid, signal.SIGKILL)
            killed.set()
        seen.update(span.version for span in choice.weight_versions)

    monkeypatch.setattr(Request, "take", note)
    monkeypatch.setattr(Engine, "_check_tokens", kill_after_a_push)
    monkeypatch.setattr(engine_module, "STREAM_INTERVAL", 32)
    kind = engine_kind | {engine_kind["engine"]: FEW[engine_kind["engine"]]}
    with (
        running_engine(folder=tied_model, log_dir=tmp_path, num_engines=2, **kind) as pair,
        routing(pair.client(), decode) as router,
    ):
        weights = {pair.push(tied_model): tied_model}
        asked = generation(0, pair.version, num_generations=16)
        answered = router.submit(asked)
        router.resume(pair.version)
        assert begun.wait(120)
        for folder in (other_model, tied_model, other_model):
            router.pause(pair.version + 1)
            pair.pause()
            weights[pair.push(folder)] = folder
            router.resume(pair.version)
            newest = str(pair.version)
            assert wait_until(lambda newest=newest: newest in seen, 120)
            if killed.is_set():  # else the request was about to end
                break
        answered.result(timeout=200)
    samples = asked.samples()
    assert {len(sample.completion_ids) for sample in samples} == {NUM_TOKENS}
    assert any(len(part.spans) == 2 for part in kept.values())  # others had just begun
    for number, part in kept.items():
        count = len(part.token_ids)
        assert count % 32 == 1  # the first token, then whole chunks of 32
        assert [*samples[number].completion_ids[:count]] == part.token_ids
        assert [*samples[number].logprobs[:count]] == part.token_logprobs
        if len(part.spans) == 2:  # else the rest is of the same version
            assert samples[number].spans[0] == part.spans[0]
        assert largest_error_by_version(weights, samples[number]) < 1e-3


@pytest.mark.long
def test_router_sees_stops_and_end_tokens_through_pushes(live_engine, router, tied_model, decode):
    tokens, ends, stops = range(20, 40), range(40, 45), []
    if live_engine.rollout.engine == "vllm":  # SGLang takes 32 strings at most, too few to occur
        stops = [decode([a]) + decode([b]) for a in tokens for b in tokens]

    def made_through_pushes():
        settings = {"num_generations": 32, "stop": stops, "stop_token_ids": ends}
        asked = generation(0, live_engine.version, **settings)
        router.resume(live_engine.version)
        made = router.submit(asked)
        for _ in range(8):
            live_engine.push_in_flight(router, tied_model, 20, [made])
            enough = live_engine.num_generated() + 20
            wait_until(
                lambda enough=enough: made.done() or live_engine.num_generated() > enough, 20, 0.005
            )
            with router.aborted():
                pass
        made.result(timeout=60)
        return asked.samples()

    samples = samples_until(lambda sample: len(sample.spans) > 1, made_through_pushes)
    assert {"stop"} <= {sample.finish_reason for sample in samples}
    for sample in samples:
        *before, last = sample.completion_ids
        assert not {*before} & {*ends}
        # With stop strings, the text of end tokens is returned, too.
        shown = before if last in ends and not stops else sample.completion_ids
        assert sample.text == decode(shown)
        found = [sample.text.find(stop) for stop in stops if stop in sample.text]
        ended_by_text = sample.finish_reason == "stop" and last not in ends
        assert found == [len(sample.text) - 2] * ended_by_text


def test_router_without_a_push_samples_as_generate_does(live_engine, router, seeds):
    alone = generate(live_engine.client(), generation(0, live_engine.version, 40))
    router.resume(live_engine.version)
    together = [generation(number, live_engine.version, 40) for number in range(2)]
    for answered in [router.submit(asked) for asked in together]:
        answered.result(timeout=60)
    samples, others = (asked.samples() for asked in together)
    assert [s.completion_ids[:5] for s in samples] == [s.completion_ids[:5] for s in alone]
    assert all(len(sample.spans) == 1 for sample in samples)
    assert others != samples


@contextmanager
def scripted(streams=True, **engines):
    """A client of scripted engines, and a router that uses it."""
    client = ScriptedClient(**engines)
    with routing(client, str, streams=streams) as router:
        yield client, router


def begin(router, count=1, num_tokens=4, **settings):
    """Completions requested of weights 7, and the futures of their end."""
    asked = [generation(number, 7, num_tokens, **settings) for number in range(count)]
    answered = [router.submit(each) for each in asked]
    router.resume(7)
    return asked, answered


def finish(answered):
    for each in answered:
        each.result(timeout=30)


def test_submit_fails_without_engines_until_a_push():
    engine = ScriptedEngine(broken_route="/collective_rpc", holds=False)
    with scripted(only=engine) as (client, router):
        router.resume(7)
        assert wait_until(lambda: not client.pool.serving, seconds=30)
        with router.aborted():  # a checkpoint forgets nothing
            pass
        asked = generation(0, 7, 4)
        with pytest.raises(NoServingEngine):
            router.submit(asked).result(timeout=30)
        engine.broken_route = ""
        router.abort()
        client.pool.finish_push(client.urls)
        router.resume(7)
        router.submit(asked).result(timeout=30)
        assert len(asked.samples()) == 8


@pytest.mark.parametrize(
    ("broken", "streams"), [(GENERATE, True), ("/health", True), ("/health", False)]
)
def test_router_keeps_what_a_lost_engine_streamed(broken, streams):
    """The requests end in the middle of a chunk, or are cancelled because a probe fails."""
    lost, other = ScriptedEngine(num_streamed=3), ScriptedEngine(holds=False)
    num_kept = 3 if streams else 0
    with scripted(streams, lost=lost, other=other) as (_, router):
        [asked], answered = begin(router, num_tokens=5)
        assert wait_until(lambda: len(lost.asked) == len(other.asked) == 4, seconds=30)
        assert wait_until(lambda: lost.num_read == (4 if streams else 0), seconds=30)
        lost.broken_route = broken
        finish(answered)
        assert len(other.asked) == 8 and other.num_tokens == [5] * 4 + [5 - num_kept] * 4
        for sample in asked.samples():
            first = len(sample.prompt.token_ids)
            assert [*sample.completion_ids] == [*range(first, first + 5)]
            assert sample.spans == ((7, 5),) and len(sample.logprobs) == 5


def withdraw(router, group, count):
    """Cancel some requests of a group, as a sample does that ends before they are answered."""
    requests = [*group._requests.values()][:count]

    async def cancel():
        for request in requests:
            request.answer.cancel()

    router.loop.call(cancel())
    return requests


def test_withdrawn_requests_are_given_up_by_their_engine():
    engine = ScriptedEngine()
    with scripted(only=engine) as (_, router):
        [asked], _ = begin(router)
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        withdraw(router, asked.groups[0], 3)
        assert wait_until(lambda: engine.num_given_up == 3, seconds=30)


@pytest.mark.parametrize("num_over", [1, 4])
def test_withdraw_keeps_a_request_of_a_lost_engine_from_others(num_over):
    lost, other = ScriptedEngine(num_streamed=3), ScriptedEngine(holds=False)
    with scripted(lost=lost, other=other) as (_, router):
        [asked], _ = begin(router, num_tokens=5)
        assert wait_until(lambda: lost.num_read == len(other.asked) == 4, seconds=30)
        assert wait_until(lambda: asked.num_open == 4, seconds=30)
        [held] = [group for group in asked.groups if group.num_open]
        over = withdraw(router, held, num_over)
        lost.broken_route = "/health"
        assert wait_until(lambda: len(other.asked) == 8 - num_over, seconds=30)
        assert not {each.priority for each in over} & {*other.asked}


@pytest.fixture
def little_room(monkeypatch):
    """Engines get two groups at once, and are probed often."""
    monkeypatch.setattr(router_module, "LEAST_ROOM", 8)
    monkeypatch.setattr(engine_module, "PROBE_INTERVAL", 0.05)


def test_room_decides_which_engine_takes_a_group(little_room):
    slow, quick = ScriptedEngine(), ScriptedEngine(holds=False)
    slow.told(generated=1, started=8, waiting=4)
    with scripted(slow=slow, quick=quick) as (_, router):
        _, answered = begin(router, count=4)
        assert wait_until(lambda: len(quick.asked) == 24, seconds=30)
        assert len(slow.asked) == 8, "its queue is full, and nothing has to be taken back"
        size = 4  # no group is split
        assert all(len({*slow.asked} & {*range(n, n + size)}) in (0, size) for n in slow.asked[::4])
        slow.holds = False
        finish(answered)


def test_room_grows_where_nothing_waits(little_room):
    one, other = ScriptedEngine(), ScriptedEngine()
    for each in (one, other):
        each.told(generated=1, started=0, waiting=8)
    with scripted(one=one, other=other) as (_, router):
        begin(router, count=4)
        assert wait_until(lambda: len(one.asked) == len(other.asked) == 8, seconds=30)
        for number in itertools.count(2):  # equal progress in each report
            one.told(generated=number, started=8, waiting=0)
            time.sleep(0.1)
            if len(one.asked) == 24:
                break
        assert len(other.asked) == 8


def test_update_health_forgets_losses_after_a_generation(monkeypatch):
    with scripted(only=ScriptedEngine(holds=False)) as (client, router):
        [url] = client.urls
        client.pool.mark_dead(url, "for a test")
        client.pool.finish_push([url])
        finish(begin(router)[1])
        assert client.pool._records[url].num_recent_losses == 1
        monkeypatch.setattr(client.pool, "check_engines", list)  # nobody is at that address
        client.update_health(lambda workers: None)
        assert client.pool._records[url].num_recent_losses == 0


def test_resume_deals_anew_to_the_engines_of_the_push():
    lost, left = ScriptedEngine(num_streamed=1), ScriptedEngine(num_streamed=2)
    other, late = ScriptedEngine(), ScriptedEngine(version=8)
    with scripted(lost=lost, left=left, other=other, late=late) as (client, router):
        client.pool.mark_dead("http://late", "it is not there yet")
        asked, answered = begin(router, count=3)
        assert wait_until(lambda: [lost.num_read, left.num_read, len(other.asked)] == [8] * 3, 30)
        router.pause(8)
        lost.broken_route = "/health"
        assert wait_until(lambda: len(router.router._queues) == 2, seconds=30)
        assert "http://lost" in client.pool.serving  # the push has not seen it
        client.pool.mark_dead("http://lost", "it is broken")
        del client.pool._records["http://left"]  # it lives, and keeps its weights
        client.pool.finish_push(["http://late"])
        other.version = 8
        router.resume(8)
        assert wait_until(lambda: len(other.asked) + len(late.asked) >= 24, seconds=30)
        assert len(late.asked) >= 8
        assert client.pool._records["http://lost"].num_losses == 1
        other.holds = late.holds = False
        finish(answered)
        spans = {s.spans for each in asked for s in each.samples()}
        assert {((7, 1), (8, 3)), ((7, 2), (8, 2))} <= spans


def test_open_channels_again_pauses_an_engine():
    with scripted(only=(engine := ScriptedEngine())) as (client, _):
        client.await_engines(lambda workers: None)
        client.open_channels({}, lambda: False)  # an earlier run may have left it asleep
        client.begin_push("8-a")
        client.open_channels({}, lambda: False)
        assert engine.is_paused


def test_cancel_keeps_what_is_sampled():
    engine = ScriptedEngine()
    with scripted(only=engine) as (client, router):
        [asked], [answered] = begin(router)
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        client.cancel()
        for waiting in (answered, router.submit(generation(1, 7))):
            with pytest.raises(Preempted):
                waiting.result(timeout=30)
        with router.aborted():
            assert [sample.spans for sample in asked.so_far()] == [((7, 2),)] * 8


def test_pause_after_cancel_waits_for_no_hung_engine(monkeypatch):
    monkeypatch.setattr(router_module, "ABORT_SECONDS", 0.2)
    with scripted(only=ScriptedEngine(silent_route="/load")) as (client, router):
        begin(router)
        time.sleep(0.1)
        client.cancel()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(router.pause, 8).result(timeout=30)


@pytest.mark.parametrize("end", ["pause", "abort"])
def test_pause_and_abort_find_a_push_of_another_trainer(end):
    engine = ScriptedEngine()
    with scripted(only=engine) as (_, router):
        _, [answered] = begin(router)
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        engine.push = "7-b"
        router.pause(8) if end == "pause" else router.abort()
        with pytest.raises(EngineError, match="is another trainer using it"):
            answered.result(timeout=30)


@pytest.mark.parametrize("route", ["/collective_rpc", "/load", "/resume"])
def test_router_loses_an_engine_that_does_not_start(route):
    with scripted(only=ScriptedEngine(silent_route=route, stall_timeout=0.5)) as (client, router):
        begin(router)
        assert wait_until(lambda: not client.pool.serving, seconds=30)
        assert "made no progress for 0.5 s" in client.pool.status_report()


def test_router_waits_for_requests_that_arrive_slowly():
    engine = ScriptedEngine(num_per_look=1, stall_timeout=0.5)
    with scripted(only=engine) as (client, router):
        _, answered = begin(router, num_generations=20)
        assert wait_until(lambda: engine.num_accepted == 40, seconds=60)  # at least a second
        engine.holds = False
        finish(answered)
        assert client.urls == [*client.pool.serving]


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ("/collective_rpc", aiohttp.ClientConnectionError),
        ("/pause", aiohttp.ClientConnectionError),
        ("/pause", aiohttp.SocketTimeoutError),  # it is healthy, but late with an answer
    ],
)
def test_router_gives_a_late_engine_what_a_lost_one_left(route, fault):
    lost = ScriptedEngine(broken_route=route, fault=fault)
    late = ScriptedEngine(delays={route: 0.1}, holds=False)
    with scripted(lost=lost, late=late) as (_, router):
        finish(begin(router)[1])


def test_router_survives_the_loss_of_two_engines():
    dying = ScriptedEngine(broken_route=GENERATE, delays={"/resume": 0.4}, num_per_look=0)
    dead = ScriptedEngine(broken_route=GENERATE, delays={GENERATE: 0.15})
    with scripted(dying=dying, dead=dead, well=ScriptedEngine(holds=False)) as (_, router):
        finish(begin(router, count=2)[1])


def test_submit_sends_a_turn_to_the_engine_of_the_last():
    a, b = ScriptedEngine(), ScriptedEngine()
    with scripted(a=a, b=b) as (_, router):
        begin(router)
        assert wait_until(lambda: len(a.asked) == len(b.asked) == 4, seconds=30)

        async def ask(url):
            sampling = {"max_tokens": 1, "temperature": 1.0}
            body = {"token_ids": [1], "sampling_params": sampling}
            router.router.submit([Request(body, 99, url=url)])

        for url, engine in (("http://b", b), ("http://a", a)):
            router.loop.call(ask(url))
            assert wait_until(lambda engine=engine: engine.asked[-1] == 99, seconds=30)
