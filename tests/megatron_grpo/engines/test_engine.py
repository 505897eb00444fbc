"""How the trainer handles an engine that answers wrongly or slowly."""

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import msgspec
import numpy as np
import pytest

from helpers.mock_session import MockSession
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.engine_queue import EngineQueue
from megatron_grpo.engines.http import EVENTS, EngineDown, EngineError
from megatron_grpo.engines.request import Request

URL = "http://engine"
MAX_TOKENS = 3
CHOICE = {
    "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    "finish_reason": "stop",
    "text": "ab",
    "token_ids": [5, 6],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9998.9}]},
}


def engine_of(answer: Callable[[httpx.Request], Any], stall: float = 60.0) -> Engine:
    """An engine whose routes answer with what `answer` returns, as JSON or text."""

    def respond(request: httpx.Request) -> httpx.Response:
        body = answer(request)
        is_text = isinstance(body, str)
        return httpx.Response(200, text=body) if is_text else httpx.Response(200, json=body)

    return Engine(URL, MockSession(URL, respond), health_timeout=60.0, stall_timeout=stall)


def generate(
    choice: dict[str, Any],
    push_afterwards: str = "7-a",
    limits: dict[str, float | None] | None = None,
    request: dict[str, Any] | None = None,
) -> Choice:
    """The choice taken from an engine that answers its one request with `choice`, at version 7."""
    push, num_asked = "7-a", 0

    def answer(request: httpx.Request) -> Any:
        nonlocal push, num_asked
        if limits is not None:
            limits[request.url.path] = request.extensions["timeout"]["read"]
        match request.url.path:
            case "/collective_rpc":
                question = json.loads(request.content)["kwargs"]["question"]
                return {"results": [{"question": question, "push": push}]}
            case "/inference/v1/generate":
                push, num_asked = push_afterwards, num_asked + 1
                return {"choices": [choice]}
            case "/metrics":
                return ""
        return {"server_load": num_asked, "success": True}

    body = request or {"sampling_params": {"max_tokens": MAX_TOKENS}}

    async def ask() -> Choice:
        asked = Request(body, 0)
        queue = EngineQueue(7, str, lambda: None, streams=False)
        queue.send([asked])
        asked.answer.add_done_callback(lambda _: queue.aborted.set())
        await queue.serve(engine_of(answer))
        return asked.answer.result()[0]

    return asyncio.run(ask())


def routes_of(num_tokens: int, dtype: type) -> np.ndarray:
    """Those of two layers with three experts per token, up to 257."""
    routes = np.arange(num_tokens * 6, dtype=dtype).reshape(num_tokens, 2, 3)
    routes[0, 0, 0] = min(257, np.iinfo(dtype).max)
    return routes


def encoded(routes: np.ndarray) -> str:
    np.save(file := io.BytesIO(), routes)
    return base64.b64encode(file.getvalue()).decode()


# Two tokens of the prompt are known from before; the last one of the completion was not read.
ROUTED = {
    "token_ids": [7, 8, 9],
    "sampling_params": {"max_tokens": MAX_TOKENS, "routed_experts_prompt_start": 2},
}


@pytest.mark.parametrize(("dtype", "kept"), [(np.uint8, np.uint8), (np.uint16, np.int16)])
def test_routes_are_read_as_vllm_writes_them(dtype, kept):
    routes = routes_of(2, dtype)
    choice = generate(CHOICE | {"routed_experts": encoded(routes)}, request=ROUTED)
    assert choice.routes.dtype == kept
    np.testing.assert_array_equal(choice.routes, routes)


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (None, "start it with the same config, or with --enable-return-routed-experts"),
        (encoded(routes_of(3, np.uint8)), "returned the routes of 3 tokens instead of 2"),
        ("", "does not return the experts"),
        ("AAAA", "returned no array"),
        ("?", "something else than a completion of vLLM 0.32 or 0.33"),
    ],
)
def test_an_answer_without_the_routes_that_were_asked_for_is_refused(answered, told):
    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{told}"):
        generate(CHOICE | {"routed_experts": answered}, request=ROUTED)


# Indexers choose three tokens: that at position 2 has all that it sees, whatever is told of it.
CHOSEN = {
    "token_ids": [7, 8, 9],
    "sampling_params": ROUTED["sampling_params"] | {"index_topk": 3},
}
CHOSEN_OF = np.array([[[1, 9, 9, 9]], [[1, 3, 1, 0]]], np.int16)  # an expert, then the tokens


def test_tokens_that_indexers_chose_are_read_behind_the_experts():
    choice = generate(CHOICE | {"routed_experts": encoded(CHOSEN_OF)}, request=CHOSEN)
    np.testing.assert_array_equal(choice.routes, CHOSEN_OF)


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (None, "which tokens indexers choose, which rollout.indexer_replay true needs: start it"),
        (encoded(CHOSEN_OF[:1]), "returned the routes of 1 tokens instead of 2"),
        (encoded(CHOSEN_OF[:, :, :1]), r"shape \(2, 1, 1\), and not \[tokens, layers, 3 tokens"),
        (
            encoded(CHOSEN_OF + 1),
            "returned 4 as a token that the indexer of layer 0 chose for the ",
        ),
        (encoded(CHOSEN_OF - 2), "returned -1 as .* the token at position 3, which sees none but"),
    ],
)
def test_tokens_that_no_indexer_can_have_chosen_are_refused(answered, told):
    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{told}"):
        generate(CHOICE | {"routed_experts": answered}, request=CHOSEN)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_cut_without_the_routes_that_were_asked_for_begins_anew(is_known):
    routes = encoded(routes_of(2, np.uint8)) if is_known else None
    cut = CHOICE | {"finish_reason": CUT, "routed_experts": routes}
    engine = engine_of(lambda request: {"choices": [cut]})
    found = asyncio.run(engine.complete(ROUTED, lambda: range(7, 8), lambda: True))
    assert found.finish_reason == CUT
    assert found.token_ids == (CHOICE["token_ids"] if is_known else [])


def test_an_answer_that_is_well_is_taken_and_a_completion_alone_may_take_any_time():
    limits: dict[str, float | None] = {}
    whole = CHOICE | {"finish_reason": "length", "token_ids": [5] * MAX_TOKENS}
    for choice in (CHOICE, whole):
        assert generate(choice, limits=limits) == msgspec.convert(choice, Choice)
    assert {path for path, limit in limits.items() if limit is None} == {"/inference/v1/generate"}
    assert len(limits) > 3


DOCTORED = {
    "two weights": (
        {
            "weight_versions": [
                {"version": "7", "start": 0, "end": 1},
                {"version": "8", "start": 1, "end": 2},
            ]
        },
        "sampled from weights of version 7, 8, but version 7 was requested",
    ),
    "given up": ({"finish_reason": "abort"}, "gave up a sample: abort"),
    "cut short": ({"finish_reason": "length"}, "completion after 2 of 3 tokens"),
    "without versions": (
        {"weight_versions": None},
        r"something else than a completion of vLLM 0.32 or 0.33, .*weight_versions",
    ),
    # vLLM's own word for a number that JSON has not.
    "not finite": (
        {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}},
        "returned a log-probability that is not finite",
    ),
}


@pytest.mark.parametrize(("differing", "told"), DOCTORED.values(), ids=DOCTORED)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(differing, told):
    kind = EngineDown if "gave up" in told else EngineError
    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{told}") as raised:
        generate(CHOICE | differing)
    assert raised.type is kind


BEGUN = CHOICE | {"finish_reason": None}
"""A chunk of a stream, the first."""
HALF_PUSHED = {"weight_versions": [{"version": "none", "start": 2, "end": 4}]}


@pytest.mark.parametrize(
    ("ended", "kind", "told"),
    [
        ({"choices": [BEGUN | HALF_PUSHED]}, EngineError, "from weights of version none, but"),
        ({"choices": [BEGUN | {"text": None}]}, EngineError, "something else than a completion"),
        ({"error": {"message": "m", "code": 400}}, EngineError, "answered .* with 400: m"),
        ({"error": {"message": "m", "code": 401}}, EngineDown, "refuses the token in MEGATRON_GR"),
        ({"error": {"message": "m", "code": 500}}, EngineDown, "answered .* with 500: m"),
        ({"choices": [BEGUN | {"finish_reason": "abort"}]}, EngineDown, "gave up a sample"),
        ({}, EngineError, "something else than a completion"),
    ],
)
def test_a_stream_that_is_not_well_ends_with_what_came_before(ended, kind, told):
    events = [json.dumps(event) for event in ({"choices": [BEGUN]}, ended)] + ["[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events)
    response = httpx.Response(200, headers={"Content-Type": EVENTS}, text=body)
    begun = Choice.empty()

    async def ask() -> None:
        http = MockSession(URL, lambda request: response)
        engine = Engine(URL, http, health_timeout=60.0, stall_timeout=60.0)
        request = {"sampling_params": {"max_tokens": 9}}
        await engine.complete(request, lambda: range(7, 8), begun=begun)

    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{told}") as raised:
        asyncio.run(ask())
    assert raised.type is kind
    assert begun.token_ids[:2] == CHOICE["token_ids"] and begun.finish_reason == "abort"
    assert len(begun.token_ids) == (4 if "gave up" in told else 2)


def test_a_stream_that_breaks_after_its_last_chunk_is_whole():
    num_read = 0

    async def body():
        nonlocal num_read
        for choice in (BEGUN, CHOICE | {"finish_reason": "stop"}):
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            num_read += 1
        raise aiohttp.ClientPayloadError("broken")

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Type": EVENTS}, content=body())

    async def ask() -> Choice:
        engine = Engine(URL, MockSession(URL, respond), health_timeout=60.0, stall_timeout=60.0)
        request = {"sampling_params": {"max_tokens": 9}}
        return await engine.complete(request, lambda: range(7, 8), begun=Choice.empty())

    assert asyncio.run(ask()).token_ids == CHOICE["token_ids"] * 2
    assert num_read == 2  # to the end: else its connection is not used again


def test_samples_of_an_engine_that_others_have_pushed_to_meanwhile_are_refused():
    with pytest.raises(EngineError, match=f"^rollout engine {URL} was given new weights while it"):
        generate(CHOICE, push_afterwards="7-b")


@pytest.fixture
def watch(monkeypatch):
    """Watches, for so many seconds, an engine that may stall for 0.1 s."""
    monkeypatch.setattr(engine_module, "PROBE_INTERVAL", 0.01)

    def watch(
        progress: Callable[[], float], answer: Callable[[httpx.Request], Any], seconds: float
    ) -> None:
        async def watch_a_while() -> None:
            async with asyncio.timeout(seconds):
                await engine_of(answer, stall=0.1).watch(progress)

        asyncio.run(watch_a_while())

    return watch


def idle(request: httpx.Request) -> str:
    return "vllm:generation_tokens_total 5.0\n"


def busy(request: httpx.Request) -> str:
    raise aiohttp.SocketTimeoutError("no answer")


def generating(request: httpx.Request) -> str:
    return f"vllm:generation_tokens_total {time.monotonic()}\n"


def stands() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("answer", "told"), [(idle, "made no progress for 0.1 s"), (busy, "did not answer within 60 s")]
)
def test_an_engine_without_a_sign_of_progress_hangs(watch, answer, told):
    with pytest.raises(EngineDown, match=f"^rollout engine {URL} {told}"):
        watch(stands, answer, seconds=30.0)


@pytest.mark.parametrize(
    ("progress", "answer"), [(time.monotonic, idle), (time.monotonic, busy), (stands, generating)]
)
def test_an_engine_that_gets_on_does_not_however_busy_it_is(watch, progress, answer):
    with pytest.raises(TimeoutError):  # of this test
        watch(progress, answer, seconds=0.5)
