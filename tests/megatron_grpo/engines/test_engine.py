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

from helpers.engines.mock_session import MockSession
from megatron_grpo.engines import engine as engine_module
from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import Engine
from megatron_grpo.engines.http import EVENTS, EngineDown, EngineError

URL = "http://engine"
CHOICE = {
    "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    "finish_reason": "stop",
    "text": "ab",
    "token_ids": [5, 6],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9998.9}]},
}


def engine_of(respond: Callable[[httpx.Request], httpx.Response], stall: float = 60.0) -> Engine:
    return Engine(URL, MockSession(URL, respond), health_timeout=60.0, stall_timeout=stall)


def encoded(routes: np.ndarray) -> str:
    np.save(file := io.BytesIO(), routes)
    return base64.b64encode(file.getvalue()).decode()


PLAIN = {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 3}}
# Routes of two prompt tokens are known; the completion's last token was not read.
ROUTED = PLAIN | {"sampling_params": {"max_tokens": 3, "routed_experts_prompt_start": 2}}
ROUTES = np.array([[[255, 1]], [[2, 3]], [[4, 5]]])
# Indexers choose three tokens; position 2 attends to all three that it sees, whatever was sent.
INDEXED = PLAIN | {"sampling_params": ROUTED["sampling_params"] | {"index_topk": 3}}
CHOSEN = np.array([[[1, 9, 9, 9]], [[1, 3, 1, 0]]], np.int16)  # an expert, then the tokens


def complete(differing: dict[str, Any], request: dict[str, Any] = PLAIN, is_cut=False) -> Choice:
    """The completion by weights 7 from an engine that answers `CHOICE | differing`."""
    engine = engine_of(lambda _: httpx.Response(200, json={"choices": [CHOICE | differing]}))
    return asyncio.run(engine.complete(request, lambda: range(7, 8), lambda: is_cut))


def test_only_complete_may_take_any_time():
    limits = {}

    def respond(request: httpx.Request) -> httpx.Response:
        limits[request.url.path] = request.extensions["timeout"]["read"]
        return httpx.Response(200, json={"choices": [CHOICE], "server_load": 0})

    async def ask(engine: Engine) -> None:
        await engine.complete(PLAIN, lambda: range(7, 8))
        await engine.num_open_requests()

    asyncio.run(ask(engine_of(respond)))
    assert [*limits.values()] == [None, 5.0]


@pytest.mark.parametrize("differing", [{}, {"finish_reason": "length", "token_ids": [5] * 3}])
def test_complete_takes_a_valid_answer(differing):
    assert complete(differing) == msgspec.convert(CHOICE | differing, Choice)


@pytest.mark.parametrize(
    ("request_", "routes", "kept"),
    [
        (ROUTED, ROUTES[:2].astype(np.uint8), np.uint8),
        (ROUTED, ROUTES[:2].astype(np.uint16) + 2, np.int16),
        (INDEXED, CHOSEN, np.int16),
    ],
)
def test_complete_reads_routes_as_vllm_writes_them(request_, routes, kept):
    found = complete({"routed_experts": encoded(routes)}, request_).routes
    assert found.dtype == kept
    np.testing.assert_array_equal(found, routes)


EIGHT = {"version": "8", "start": 1, "end": 2}
NO_COMPLETION = "did not answer with a completion of vLLM 0.32 or 0.33"
# vLLM sends -9999 in place of -inf, which JSON lacks.
NOT_FINITE = {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}}


@pytest.mark.parametrize(
    ("request_", "differing", "error"),
    [
        (
            PLAIN,
            {"weight_versions": [*CHOICE["weight_versions"], EIGHT]},
            "sampled from weights of version 7, 8, but version 7 was requested",
        ),
        (PLAIN, {"finish_reason": "abort"}, "gave up a sample: abort"),
        (PLAIN, {"finish_reason": "length"}, "completion after 2 of 3 tokens"),
        (PLAIN, {"weight_versions": None}, f"{NO_COMPLETION}, .*weight_versions"),
        (PLAIN, NOT_FINITE, "returned a log-probability that is not finite"),
        (ROUTED, {}, "start it with the same config, or with --enable-return-routed-experts"),
        (ROUTED, ROUTES, "the routes of 3 tokens instead of 2"),
        (ROUTED, {"routed_experts": ""}, "does not return the experts"),
        (ROUTED, {"routed_experts": "AAAA"}, "returned no array"),
        (ROUTED, {"routed_experts": "?"}, NO_COMPLETION),
        (INDEXED, {}, "which tokens indexers choose, which rollout.indexer_replay true needs: st"),
        (INDEXED, CHOSEN[:1], "the routes of 1 token instead of 2"),
        (INDEXED, CHOSEN[:, :, :1], r"shape \(2, 1, 1\), and not \[tokens, layers, 3 tokens"),
        (INDEXED, CHOSEN + 1, "returned 4 as a token that the indexer of layer 0 chose for the "),
        (INDEXED, CHOSEN - 2, "returned -1 as .* the token at position 3, which sees none but"),
    ],
)
def test_complete_refuses_an_answer_that_does_not_fit_the_request(request_, differing, error):
    if isinstance(differing, np.ndarray):
        differing = {"routed_experts": encoded(differing)}
    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{error}") as raised:
        complete(differing, request_)
    assert raised.type is (EngineDown if "gave up" in error else EngineError)


@pytest.mark.parametrize(("routes", "num_kept"), [(encoded(ROUTES[:2]), 2), (None, 0)])
def test_complete_restarts_a_completion_cut_without_routes(routes, num_kept):
    found = complete({"finish_reason": CUT, "routed_experts": routes}, ROUTED, is_cut=True)
    assert found.finish_reason == CUT
    assert found.token_ids == CHOICE["token_ids"][:num_kept]


BEGUN = CHOICE | {"finish_reason": None}
"""The first chunk of a stream."""
HALF_PUSHED = {"weight_versions": [{"version": "none", "start": 2, "end": 4}]}


def stream(content: Any, begun: Choice) -> Choice:
    """Complete `begun` by an engine that streams this content."""
    response = httpx.Response(200, headers={"Content-Type": EVENTS}, content=content)
    request = {"sampling_params": {"max_tokens": 9}}
    engine = engine_of(lambda _: response)
    return asyncio.run(engine.complete(request, lambda: range(7, 8), begun=begun))


@pytest.mark.parametrize(
    ("ended", "kind", "error"),
    [
        ({"choices": [BEGUN | HALF_PUSHED]}, EngineError, "from weights of version none, but"),
        ({"choices": [BEGUN | {"text": None}]}, EngineError, "did not answer with a completion"),
        ({"error": {"message": "m", "code": 400}}, EngineError, "answered .* with 400: m"),
        ({"error": {"message": "m", "code": 401}}, EngineDown, "refuses the token in MEGATRON_GR"),
        ({"error": {"message": "m", "code": 500}}, EngineDown, "answered .* with 500: m"),
        ({"choices": [BEGUN | {"finish_reason": "abort"}]}, EngineDown, "gave up a sample"),
        ({}, EngineError, "did not answer with a completion"),
    ],
)
def test_complete_keeps_tokens_before_a_bad_end(ended, kind, error):
    events = [json.dumps({"choices": [BEGUN]}), json.dumps(ended), "[DONE]"]
    begun = Choice.empty()
    with pytest.raises(EngineError, match=f"^rollout engine {URL} .*{error}") as raised:
        stream("".join(f"data: {event}\n\n" for event in events), begun)
    assert raised.type is kind
    assert begun.token_ids == CHOICE["token_ids"] * (2 if "gave up" in error else 1)
    assert begun.finish_reason == "abort"


def test_complete_takes_a_stream_that_breaks_after_its_last_chunk():
    num_read = 0

    async def body():
        nonlocal num_read
        for choice in (BEGUN, CHOICE):
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            num_read += 1
        raise aiohttp.ClientPayloadError("broken")

    assert stream(body(), Choice.empty()).token_ids == CHOICE["token_ids"] * 2
    assert num_read == 2  # read to the end, else the connection is not used again


def idle(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text="vllm:generation_tokens_total 5.0\n")


def busy(request: httpx.Request) -> httpx.Response:
    raise aiohttp.SocketTimeoutError("no answer")


def generating(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text=f"vllm:generation_tokens_total {time.monotonic()}\n")


def stands() -> float:
    return 0.0


GETS_ON = (TimeoutError, None)  # the test's own time-out


@pytest.mark.parametrize(
    ("progress", "answer", "outcome"),
    [
        (stands, idle, (EngineDown, f"^rollout engine {URL} made no progress for 0.1 s")),
        (stands, busy, (EngineDown, f"^rollout engine {URL} did not answer within 60 s")),
        (time.monotonic, idle, GETS_ON),
        (time.monotonic, busy, GETS_ON),
        (stands, generating, GETS_ON),
    ],
)
def test_watch_calls_an_engine_without_progress_hung(monkeypatch, progress, answer, outcome):
    monkeypatch.setattr(engine_module, "PROBE_INTERVAL", 0.01)

    async def watch() -> None:
        async with asyncio.timeout(0.5 if outcome is GETS_ON else 30.0):
            await engine_of(answer, stall=0.1).watch(progress)

    kind, error = outcome
    with pytest.raises(kind, match=error):
        asyncio.run(watch())
