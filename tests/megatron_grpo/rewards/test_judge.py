"""The judge against a server that misbehaves on demand; `engines/test_client.py` has a vLLM."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from helpers.engines.json_server import JsonServer, Reply, Request, json_server
from helpers.engines.proxies import set_proxies
from helpers.runs.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.functions import Answer, load_function
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.scoring import Call

TEMPLATE = 'Rate {completion} as {"score": 1}. Asked: {prompt}. Right: {answer}.'
Serve = Callable[[Reply], JsonServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with this reply; a text is the content of a completion."""
    with ExitStack() as servers:

        def start(reply: Reply) -> JsonServer:
            def complete(request: Request) -> tuple[int, Any] | None:
                assert request.path.endswith("/v1/chat/completions")  # after the host, for a proxy
                answer = reply(request)
                if answer and isinstance(answer[1], str):
                    message = {"role": "assistant", "content": answer[1]}
                    return answer[0], {"choices": [{"message": message}]}
                return answer

            return servers.enter_context(json_server(complete))

        yield start


def text_of(request: Request) -> str:
    return request.body["messages"][0]["content"]


def judge(server: JsonServer, **arguments: Any) -> RewardFunction:
    fields = {"base_url": f"{server.url}/v1", "model": "m", "prompt": TEMPLATE, "max_score": 10}
    return RewardFunction(name="judge", arguments=fields | arguments)


def samples(completions: list[str], num_prompts: int = 1) -> list[Sample]:
    # Columns named like the judge's arguments do not replace them.
    others = {"prompt": "p", "model": "other", "pattern": "x"}
    return [
        sample_of(text, {"answer": index} | others, index, number)
        for index in range(num_prompts)
        for number, text in enumerate(completions)
    ]


def answer_to(function: RewardFunction, completions: list[str], timeout: float = 20) -> Answer:
    """The judge's answer on completions of one prompt, in this process."""
    columns = Call(0, range(len(completions)), samples(completions)).columns(None)
    return asyncio.run(load_function(function).call_async(columns, timeout))


def scores(function: RewardFunction, completions: list[str]) -> list[float] | None:
    return answer_to(function, completions).scores


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_is_used_only_for_addresses_outside_of_this_host(serve, monkeypatch, variable):
    proxy = serve(lambda _: (403, b"<html>not through here"))
    set_proxies(monkeypatch, **{variable: proxy.url.replace("//", "//me:secret@")})
    assert scores(judge(serve(lambda _: (200, "7"))), ["a"]) == [0.7]
    assert proxy.requests == []
    error = answer_to(judge(proxy, base_url="http://judge.example/v1"), ["a"]).error
    assert f"not through here (the environment has {variable}: " in error
    assert "add judge.example to NO_PROXY" in error


def test_a_proxy_that_refuses_to_connect_is_named_without_its_password(serve, monkeypatch):
    server = serve(lambda _: (200, "7"))
    for address in (server.url.replace("//", "//me:secret@"), "http://me:secret@proxy:no-port"):
        set_proxies(monkeypatch, https_proxy=address)
        there = judge(server, base_url="https://judge.example/v1")
        error = answer_to(there, ["a"], timeout=1).error
        assert "(the environment has https_proxy: " in error and "secret" not in error


def test_judge_fills_the_template_and_takes_the_last_number_of_the_answer(serve):
    said = {
        "a": "7", "b": "no: 3/10", "c": "**-2.5**", "d": "1. is 9 out of 10", "e": "1\n: 0.5"
    }  # fmt: skip
    server = serve(lambda request: (200, said.get(text_of(request)[5], "1")))
    assert scores(judge(server), list(said)) == [0.7, 0.3, -0.25, 0.9, 0.05]
    body = server.requests[0].body
    assert body["model"] == "m" and body["temperature"] == 0
    asked = 'Rate a as {"score": 1}. Asked: prompt 0. Right: 0.'
    assert asked in map(text_of, server.requests)
    scores(judge(server), ["{answer} {0}"])  # braces of a completion are text
    assert text_of(server.requests[-1]).startswith("Rate {answer} {0} as {")


def test_pattern_finds_the_number_and_extra_body_is_sent(serve):
    server = serve(lambda _: (200, "Score: 1, I mean Score: 4 of 10"))
    function = judge(server, pattern=r"Score: (\d+)", extra_body={"max_tokens": 9})
    assert scores(function, ["a"]) == [0.4]
    assert server.requests[0].body["max_tokens"] == 9


def test_key_comes_from_the_environment(serve, monkeypatch):
    server = serve(lambda _: (200, "1"))
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    scores(judge(server, api_key_env="MY_KEY"), ["a"])
    scores(judge(server), ["a"])
    monkeypatch.delenv("OPENAI_API_KEY")
    scores(judge(server), ["a"])
    keys = [request.headers["Authorization"] for request in server.requests]
    assert keys == ["Bearer secret", "Bearer usual", None]


def test_request_with_a_transient_failure_is_sent_again(serve):
    replies = {1: (429, "slow down"), 2: (503, "loading"), 3: (0, None), 4: (200, "5")}
    server = serve(lambda request: replies[request.times])
    assert scores(judge(server), ["a", "b"]) == [0.5, 0.5]
    assert len(server.requests) == 8


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((200, "no number"), "no score in the judge's answer 'no number'"),
        ((200, "I say 11"), "the judge's score 11.0 is beyond max_score 10"),
        ((200, b"<html>"), "not a chat completion: <html>"),
        ((200, {"choices": []}), "not a chat completion"),
        ((404, {"error": "no model m"}), 'answered status 404: {"error": "no model m"}'),
        (None, "gave no answer in time, at last TimeoutError"),
    ],
)
def test_answer_without_a_score_is_masked_and_its_neighbours_count(reply, error, serve):
    server = serve(lambda req: reply if text_of(req).startswith("Rate bad") else (200, "5"))
    judged = answer_to(judge(server), ["good", "bad", "fine"], timeout=1)
    assert judged.scores == pytest.approx([0.5, math.nan, 0.5], nan_ok=True)
    assert f"returned Unscored: {error}" in judged.error.replace(f"{server.url}/v1 ", "")


def test_requests_of_all_prompts_are_open_at_once(serve):
    arrived, many = [], threading.Event()

    def reply(request: Request) -> tuple[int, str]:
        arrived.append(request)
        if len(arrived) > 32:
            many.set()
        many.wait()
        return 200, "5"

    function = judge(serve(reply))
    batch = samples(list("abcd"), 16)
    cfg = RewardConfig(functions=(function,), timeout=60, num_workers=1)
    with closing(RewardPool(cfg)) as pool:
        pool.wait_ready([sample.prompt.row for sample in batch])
        assert pool.score(batch, num_completions=64) == [{"judge": 0.5}] * 64


def test_template_with_an_answer_requires_that_column(serve):
    function = load_function(judge(serve(lambda _: (200, "5"))))
    with pytest.raises(ValueError, match=r"contains \{answer\}, and the data has no column"):
        asyncio.run(function.call_async({"completions": ["a"], "prompts": ["p"]}, 20))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "requires 'base_url': give it in `arguments`"),
        ({"base_url": "host:8000"}, "is not an address like http://host:8000/v1"),
        ({"prompt": "Rate it."}, "prompt has no {completion}"),
        ({"pattern": "[0-9]+"}, "has no group"),
        ({"pattern": "([0-9]+"}, "missing ), unterminated subpattern"),
        ({"max_score": 0}, "max_score 0 must be above 0, such as 10"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment has no variable NO_SUCH_KEY"),
        ({"temprature": 1}, "has no argument 'temprature': it has api_key_env, base_url, "),
    ],
)
def test_invalid_arguments_are_refused(arguments, part):
    fields = {"base_url": "http://localhost/v1", "model": "m", "prompt": "{completion}"}
    with pytest.raises(ValueError) as refused:
        load_function(RewardFunction(name="judge", arguments=arguments and fields | arguments))
    assert part in str(refused.value)
