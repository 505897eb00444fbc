"""Completions that go on under new weights: against a real vLLM whose weights change meanwhile."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from transformers import AutoTokenizer

from helpers.engines import (
    largest_error_by_version,
    random_prompts,
    running_engine,
    samples_until,
    sampling_params,
    served_model,
    wait_until,
)
from helpers.scripted_engines import ScriptedClient, ScriptedEngine
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.engine import GENERATE, Engine
from megatron_grpo.engines.generation import CompletionRequests
from megatron_grpo.engines.http import EngineError, NoServingEngine
from megatron_grpo.engines.in_flight import MOST_REQUESTS, InFlight, OpenGenerations
from megatron_grpo.environments import EnvironmentsLost
from megatron_grpo.launch.process import Preempted

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """`tied_model` with other weights."""
    return served_model(tmp_path_factory.mktemp("other"), "qwen3", tied=True, seed=1)


@pytest.fixture
def client(live_engine, tied_model):
    live_engine.push(tied_model)
    return live_engine.client()


@contextmanager
def lasting(client, model):
    """An `InFlight` that uses the client, and ends."""
    decode = AutoTokenizer.from_pretrained(model).decode
    in_flight = InFlight(client, partial(decode, skip_special_tokens=True))
    try:
        yield in_flight
    finally:
        in_flight.end()
        in_flight.close()


@pytest.fixture
def in_flight(client, tied_model):
    with lasting(client, tied_model) as in_flight:
        yield in_flight


@pytest.fixture
def threads(client, in_flight):
    with ThreadPoolExecutor(2) as threads:
        yield threads
        client.cancel()


def generation(number, version, num_tokens=NUM_TOKENS, kind=CompletionRequests, **settings):
    """Four samples of each of two prompts, without an end token."""
    defaults = {
        "num_generations": 4,
        "policy_version": version,
        "max_completion_length": num_tokens,
        "stop_token_ids": (),
        "series": number,
    }
    params = sampling_params(**defaults | settings)
    return kind(random_prompts(2, seed=number), params)


@pytest.mark.long
def test_every_token_has_the_probability_that_the_weights_of_its_version_give_it(
    live_engine, in_flight, threads, tied_model, other_model
):
    weights = {live_engine.version: tied_model}

    def made_through_pushes():
        in_flight.resume(live_engine.version)
        first, size = live_engine.num_generated(), {"num_tokens": 400, "num_generations": 8}
        asked = [generation(number, live_engine.version, **size) for number in range(2)]
        made = [threads.submit(in_flight.generate, *each) for each in enumerate(asked)]
        assert wait_until(lambda: live_engine.num_generated() >= first + 100, 120, 0.005)
        with in_flight.suspended():  # as for a checkpoint
            parts = [sample for each in asked for sample in each.so_far()]
            assert CUT in {part.finish_reason for part in parts}
            assert all(part.completion_ids for part in parts)
        for num_flips, folder in enumerate((other_model, tied_model)):
            live_engine.pause_after(100, lambda: all(each.done() for each in made))
            in_flight.hold(live_engine.version + 1)
            weights[live_engine.push(folder, num_flips)] = folder  # the second at two attempts
            in_flight.resume(live_engine.version)
        samples = [sample for each in made for sample in each.result(timeout=120)]
        assert len(samples) == 32
        return samples

    samples = samples_until(lambda sample: len(sample.spans) == 3, made_through_pushes)
    for sample in samples:
        assert sum(count for _, count in sample.spans) == len(sample.completion_ids) == 400
    checked = [sample for sample in samples if len(sample.spans) == 3][:8] + samples[::8]
    assert all(largest_error_by_version(weights, sample) < 1e-3 for sample in checked)


FEW = {"vllm": {"max_num_seqs": 1}, "sglang": {"max_running_requests": 1}}
"""Of an engine that answers one request at a time, so that it is not done before it is killed."""


@pytest.mark.long
def test_completions_of_an_engine_that_is_killed_go_on_at_another_with_what_it_has_streamed(
    tied_model, other_model, tmp_path, engine_kind, monkeypatch
):
    kept, keep, check = {}, OpenGenerations.keep, Engine._check_tokens
    begun, killed, told = threading.Event(), threading.Event(), set()

    def note(self, number, begun, url):
        kept[number] = begun
        return keep(self, number, begun, url)

    def kill_after_a_push(self, choice, versions):
        check(self, choice, versions)
        if self.url != pair.servers.base_urls[0] or killed.is_set():
            return
        begun.set()
        if choice.finish_reason == CUT and len(choice.weight_versions) == 2:
            os.kill(pair.servers._engine(self.url).process.pid, signal.SIGKILL)
            killed.set()
        told.update(span.version for span in choice.weight_versions)

    monkeypatch.setattr(OpenGenerations, "keep", note)
    monkeypatch.setattr(Engine, "_check_tokens", kill_after_a_push)
    monkeypatch.setattr(engine_module, "STREAM_INTERVAL", 32)
    few = {engine_kind["engine"]: FEW[engine_kind["engine"]]}
    with (
        running_engine(
            folder=tied_model, log_dir=tmp_path, num_engines=2, **few, **engine_kind
        ) as pair,
        lasting(pair.client(), tied_model) as in_flight,
    ):
        weights = {pair.push(tied_model): tied_model}
        asked = generation(0, pair.version, num_generations=16)
        answered = in_flight.submit(0, asked)
        in_flight.resume(pair.version)
        assert begun.wait(120)
        for folder in (other_model, tied_model, other_model):
            in_flight.hold(pair.version + 1)
            pair.pause()
            weights[pair.push(folder)] = folder
            in_flight.resume(pair.version)
            newest = str(pair.version)
            assert wait_until(lambda newest=newest: newest in told, 120)
            if killed.is_set():  # else the request was about to end
                break
        answered.result(timeout=200)
    samples = asked.samples()
    assert {len(sample.completion_ids) for sample in samples} == {NUM_TOKENS}
    assert any(len(part.spans) == 2 for part in kept.values())  # others had just begun
    for number, part in kept.items():
        count = len(part.token_ids)
        assert count % 32 == 1  # the first token, then all but the last 31 or less
        assert [*samples[number].completion_ids[:count]] == part.token_ids
        assert [*samples[number].logprobs[:count]] == part.token_logprobs
        if len(part.spans) == 2:  # else the rest is of the same version
            assert samples[number].spans[0] == part.spans[0]
        assert largest_error_by_version(weights, samples[number]) < 1e-3


def test_a_completion_that_is_cut_ends_at_its_first_end_token(live_engine, in_flight, threads):
    ends = range(20, 45)
    asked = generation(0, live_engine.version, num_generations=64, stop_token_ids=ends)
    in_flight.resume(live_engine.version)
    made = threads.submit(in_flight.generate, 0, asked)
    for _ in range(4):
        before = live_engine.num_generated()
        wait_until(
            lambda before=before: made.done() or live_engine.num_generated() > before, 20, 0.005
        )
        in_flight.suspend()
        in_flight.resume(live_engine.version)
    for sample in made.result(timeout=60):
        assert not {*sample.completion_ids[:-1]} & {*ends}


@pytest.mark.long
def test_stop_strings_are_seen_through_pushes(live_engine, in_flight, threads, tied_model):
    if live_engine.rollout.engine == "sglang":
        pytest.skip("SGLang takes 32 strings at most, too few to be seen by chance")
    tokenizer = AutoTokenizer.from_pretrained(tied_model)
    characters = [tokenizer.decode([token]) for token in range(20, 40)]
    stops = [a + b for a in characters for b in characters]

    def made_through_pushes():
        asked = generation(0, live_engine.version, num_generations=32, stop=stops)
        in_flight.resume(live_engine.version)
        made = threads.submit(in_flight.generate, 0, asked)
        for _ in range(8):
            live_engine.pause_after(20, made.done)
            in_flight.hold(live_engine.version + 1)
            in_flight.resume(live_engine.push(tied_model))
            enough = live_engine.num_generated() + 20
            wait_until(
                lambda enough=enough: made.done() or live_engine.num_generated() > enough, 20, 0.005
            )
            with in_flight.suspended():
                pass
        return made.result(timeout=60)

    samples = samples_until(lambda sample: len(sample.spans) > 1, made_through_pushes)
    assert {"stop"} <= {sample.finish_reason for sample in samples}
    for sample in samples:
        assert sample.text == tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
        found = [stop for stop in stops if stop in sample.text]
        if sample.finish_reason == "length":
            assert not found
        else:
            assert [*map(sample.text.find, found)] == [len(sample.text) - 2]


def test_completions_without_a_push_are_those_of_one_generation_alone(
    live_engine, client, in_flight, threads, seeds
):
    alone = client.generate(generation(0, live_engine.version, 40))
    in_flight.resume(live_engine.version)
    together = [
        threads.submit(in_flight.generate, number, generation(number, live_engine.version, 40))
        for number in range(2)
    ]
    samples = together[0].result(timeout=60)
    assert [s.completion_ids[:5] for s in samples] == [s.completion_ids[:5] for s in alone]
    assert all(len(sample.spans) == 1 for sample in samples)
    assert together[1].result(timeout=60) != samples


@contextmanager
def scripted(streams=True, **engines):
    """A client of scripted engines, and an `InFlight` that uses it."""
    client = ScriptedClient(**engines)
    in_flight = InFlight(client, str, streams=streams)
    try:
        yield client, in_flight
    finally:
        in_flight.end()
        in_flight.close()


def test_what_is_asked_for_when_no_engine_is_left_is_told_so_until_there_is_a_push():
    engine = ScriptedEngine(broken_route="/collective_rpc")
    engine.answers.set()
    with scripted(only=engine) as (client, in_flight):
        in_flight.resume(7)
        assert wait_until(lambda: not client.pool.serving, seconds=30)
        time.sleep(0.1)  # nobody waits for anything by then
        with in_flight.suspended():  # a checkpoint forgets nothing
            pass
        with pytest.raises(NoServingEngine):
            in_flight.submit(0, generation(0, 7, 4)).result(timeout=30)
        engine.broken_route = ""
        in_flight.suspend()
        client.pool.finish_push(client.urls)
        asked = generation(0, 7, 4)
        answered = in_flight.submit(0, asked)
        in_flight.resume(7)
        answered.result(timeout=30)
        assert len(asked.samples()) == 8


def test_who_waits_is_told_that_environments_are_lost_and_the_others_go_on():
    engine, is_on_fire = ScriptedEngine(), threading.Event()

    class Lost(CompletionRequests):
        waiting = (0,)

        async def next_request(self, number):
            while not is_on_fire.is_set():
                await asyncio.sleep(0.01)
            raise EnvironmentsLost("by fire")

    with scripted(only=engine) as (_, in_flight):
        answered = in_flight.submit(1, generation(1, 7, 4))
        told = in_flight.submit(0, generation(0, 7, 4, kind=Lost))
        in_flight.resume(7)
        assert wait_until(lambda: len(engine.asked) == 16, seconds=30)
        is_on_fire.set()
        with pytest.raises(EnvironmentsLost, match="by fire"):
            told.result(timeout=30)
        engine.first_held = MOST_REQUESTS  # those of who was told are answered all the same
        time.sleep(0.1)
        engine.answers.set()
        answered.result(timeout=30)


@pytest.mark.parametrize(
    ("broken", "streams"), [(GENERATE, True), ("/health", True), ("/health", False)]
)
def test_what_an_engine_has_streamed_until_it_is_lost_is_kept(broken, streams):
    """The requests end in the middle of a chunk, or are cancelled because a probe fails."""
    lost, other = ScriptedEngine(num_streamed=3), ScriptedEngine()
    other.answers.set()
    num_kept = 3 if streams else 0
    with scripted(streams, lost=lost, other=other) as (_, in_flight):
        asked = generation(0, 7, 5)
        answered = in_flight.submit(0, asked)
        in_flight.resume(7)
        assert wait_until(lambda: len(lost.asked) == len(other.asked) == 4, seconds=30)
        assert wait_until(lambda: lost.num_read == (4 if streams else 0), seconds=30)
        lost.broken_route = broken
        answered.result(timeout=30)
        assert len(other.asked) == 8 and other.num_tokens == [5] * 4 + [5 - num_kept] * 4
        for sample in asked.samples():
            first = len(sample.prompt.token_ids)
            assert [*sample.completion_ids] == [*range(first, first + 5)]
            assert sample.spans == ((7, 5),) and len(sample.logprobs) == 5


@pytest.mark.parametrize("num_over", [1, 4])
def test_nobody_goes_on_with_a_request_that_was_taken_back_when_its_engine_is_lost(num_over):
    lost, other = ScriptedEngine(num_streamed=3), ScriptedEngine()
    other.answers.set()
    with scripted(lost=lost, other=other) as (_, in_flight):
        asked = generation(0, 7, 5)
        answered = in_flight.submit(0, asked)
        in_flight.resume(7)
        assert wait_until(lambda: lost.num_read == len(other.asked) == 4, seconds=30)
        assert wait_until(lambda: len(asked.open) == 4, seconds=30)
        over = lost.asked[:num_over]
        for number in over:
            del asked.open[number]  # as of an agent whose session is over
        lost.broken_route = "/health"
        answered.result(timeout=30)
        assert sorted([*other.asked, *over]) == [*range(8)]
        assert asked.begun == {}


@pytest.mark.parametrize("num_cut_tokens", [0, 2])
def test_who_waits_is_told_if_all_that_was_cut_is_taken_back(num_cut_tokens):
    engine = ScriptedEngine(num_cut_tokens=num_cut_tokens)
    with scripted(only=engine) as (_, in_flight):
        in_flight.resume(7)
        asked = generation(0, 7, 4)
        answered = in_flight.submit(0, asked)
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        with in_flight.suspended():
            asked.open.clear()
        answered.result(timeout=30)
        assert len(engine.asked) == 8


def test_losses_of_an_engine_that_serves_from_push_to_push_do_not_add_up():
    engine = ScriptedEngine()
    engine.answers.set()
    with scripted(only=engine) as (client, in_flight):
        [url] = client.urls
        client.pool.mark_dead(url, "for a test")
        client.pool.finish_push([url])
        in_flight.resume(7)
        in_flight.submit(0, generation(0, 7, 4)).result(timeout=30)
        assert client.pool._records[url].num_recent_losses == 1
        in_flight.suspend()
        assert client.pool._records[url].num_recent_losses == 0


def test_a_push_decides_which_engines_go_on_with_the_requests():
    lost, left = ScriptedEngine(num_streamed=1), ScriptedEngine(num_streamed=2)
    other = ScriptedEngine()
    late = ScriptedEngine(version=8)
    with scripted(lost=lost, left=left, other=other, late=late) as (client, in_flight):
        client.pool.mark_dead("http://late", "it is not there yet")
        in_flight.resume(7)
        asked = [generation(number, 7, 4) for number in range(3)]
        answered = [in_flight.submit(*each) for each in enumerate(asked)]
        assert wait_until(lambda: [lost.num_read, left.num_read, len(other.asked)] == [8] * 3, 30)
        in_flight.hold(8)
        lost.broken_route = "/health"
        assert wait_until(lambda: len(in_flight._dispatcher._queues) == 2, seconds=30)
        assert "http://lost" in client.pool.serving  # the push has not seen it
        client.pool.mark_dead("http://lost", "it is broken")
        del client.pool._records["http://left"]  # it lives, and keeps its weights
        client.pool.finish_push(["http://late"])
        other.version = 8
        in_flight.resume(8)
        assert wait_until(lambda: len(other.asked) + len(late.asked) == 24, seconds=30)
        assert len(late.asked) >= 8
        assert client.pool.life("http://lost") == ("http://lost", 1)
        for engine in (other, late):
            engine.answers.set()
        for each in answered:
            each.result(timeout=30)
        spans = {s.spans for each in asked for s in each.samples()}
        assert spans == {((8, 4),), ((7, 1), (8, 3)), ((7, 2), (8, 2))}


def test_an_engine_holds_its_requests_while_a_push_is_repeated():
    engine = ScriptedEngine()
    with scripted(only=engine) as (client, _):
        client.await_engines(lambda workers: None)
        client.open_channels({}, lambda: False)  # an earlier run may have let it sleep
        client.begin_push("8-a")
        client.open_channels({}, lambda: False)
        assert engine.is_paused


def test_who_waits_is_told_that_the_run_ends():
    with scripted(only=ScriptedEngine()) as (client, in_flight):
        waiting = in_flight.submit(0, generation(0, 7))
        client.cancel()  # while the engines are suspended
        with pytest.raises(Preempted):
            waiting.result(timeout=30)
        with pytest.raises(Preempted):
            in_flight.submit(1, generation(1, 7)).result(timeout=30)


def test_a_run_that_is_to_stop_keeps_what_is_sampled():
    engine = ScriptedEngine()
    with scripted(only=engine) as (client, in_flight):
        in_flight.resume(7)
        asked = generation(0, 7, 4)
        answered = in_flight.submit(0, asked)
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        client.cancel()
        with pytest.raises(Preempted):
            answered.result(timeout=30)
        with in_flight.suspended():
            assert [sample.spans for sample in asked.so_far()] == [((7, 2),)] * 8


def test_no_push_waits_for_an_engine_that_hangs_as_it_starts_when_the_run_is_to_stop(monkeypatch):
    monkeypatch.setattr("megatron_grpo.engines.in_flight.CUT_SECONDS", 0.2)
    with scripted(only=ScriptedEngine(silent_route="/load")) as (client, in_flight):
        in_flight.resume(7)
        in_flight.submit(0, generation(0, 7, 4))
        time.sleep(0.1)
        client.cancel()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(in_flight.hold, 8).result(timeout=30)


def test_a_push_by_another_trainer_is_found_out_before_the_next():
    engine = ScriptedEngine()
    with scripted(only=engine) as (_, in_flight):
        in_flight.resume(7)
        answered = in_flight.submit(0, generation(0, 7, 4))
        assert wait_until(lambda: len(engine.asked) == 8, seconds=30)
        engine.version = 9
        in_flight.hold(8)
        with pytest.raises(EngineError, match="is another trainer using it"):
            answered.result(timeout=30)
