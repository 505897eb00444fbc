"""Agents with real clients at a real engine: the sampled tokens are those that are trained on."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI
from transformers import AutoTokenizer

from helpers.engines.live import (
    random_prompts,
    reference_logprobs,
    running_engine,
    sampling_params,
    wait_until,
)
from helpers.engines.sampling import routing
from helpers.models.tiny import EOS_ID, tiny_model
from helpers.runs.agents import act, as_plain, generation_of, running_agents, waiting_agents
from helpers.runs.environments import sleepers
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.chat import BadRequest
from megatron_grpo.agents.session import Session
from megatron_grpo.config.agent import AgentConfig
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.choice import Choice, Logprobs

pytestmark = pytest.mark.engines

PROGRAM = """
import http.client, json, os, urllib.parse

server = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
for word in ("one", "two"):
    body = json.dumps({"messages": [{"role": "user", "content": word}]})
    connection = http.client.HTTPConnection(server.netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", "/v1/chat/completions", body, headers)
    assert connection.getresponse().status == 200
print(0.5)
"""
NESTED = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
TINY_NAME = load_config(TINY_CONFIG, []).model.path.name


@pytest.fixture
def engine(live_engine, tied_model):
    live_engine.push(tied_model)
    return live_engine


@pytest.fixture(scope="module")
def waiting(live_engine, tied_model, tmp_path_factory):
    """(address, key) of a session whose agent does nothing."""
    live_engine.push(tied_model)
    folder = tmp_path_factory.mktemp("waiting")
    with waiting_agents(live_engine, tied_model, folder) as waiting:
        yield waiting


def trained_on(sample):
    """Each trained token with all tokens before it, and its log-probability."""
    found = []
    for each in as_plain(sample):
        tokens = [*each.prompt.token_ids, *each.completion_ids]
        start = len(each.prompt.token_ids)
        for i, (is_sampled, logprob) in enumerate(zip(each.loss_mask, each.logprobs, strict=True)):
            if is_sampled:
                found.append((tuple(tokens[: start + i + 1]), round(logprob, 5)))
    return found


def check_exact(samples, made, model):
    """Assert that each sampled token is trained on once, in the context that the engine had."""
    for number, sample in enumerate(samples):
        record = made.record[number]
        recorded = [
            ((*prompt, *ids[: i + 1]), round(logprobs[i], 5))
            for prompt, ids, logprobs in record
            for i in range(len(ids))
        ]
        assert Counter(trained_on(sample)) == Counter(recorded)
        assert sum(count for _, count in sample.spans) == len(sample.completion_ids)
        assert len(sample.step_rewards) == len(record)
        for each in as_plain(sample):
            gap = reference_logprobs(model, each) - torch.tensor(each.logprobs)
            assert (gap.abs() * torch.tensor(each.loss_mask)).max() < 1e-4


@pytest.mark.parametrize(
    ("function", "num_turns", "num_sequences", "reward", "roles"),
    [
        ("append", 3, 1, 0.5, {"user"}),
        ("fork", 5, 3, 1.0, {"user"}),
        ("rewrite", 4, 3, 0.25, {"user", "system user"}),
        ("complete", 3, None, 1.0, {""}),
    ],
)
def test_every_sampled_token_of_agents_is_trained_on_once(
    engine, tied_model, tmp_path, function, num_turns, num_sequences, reward, roles
):
    with running_agents(engine, tied_model, tmp_path, function=function) as agents:
        samples, made = act(agents, engine)
    assert made.failures == []
    assert [(s.prompt.index, s.sample_index) for s in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    check_exact(samples, made, tied_model)
    for number, sample in enumerate(samples):
        assert len(sample.step_rewards) == num_turns
        assert (sample.finish_reason, sample.dialogue_reward) == ("stop", reward)
        # A message without text gives a branch nothing to be recognised by.
        if num_sequences and all(len(ids) > 1 for _, ids, _ in made.record[number]):
            assert len(sample.sequences) == num_sequences
        assert len(sample.heard) == num_turns
        assert {" ".join(heard.roles) for heard in sample.heard} == roles
        assert all(len(heard.texts) == len(heard.roles) for heard in sample.heard)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "settings", "failure"),
    [
        ("silent", {}, "it ended without asking for a turn"),
        ("wrong", {}, "its reward 'much' is not a finite number"),
        ("nothing", {}, "it gave no reward: set agent.weight=0"),
        ("greedy", {"max_turns": 2}, "agent.max_turns 2 is reached"),
        ("greedy", {"max_tokens": 5}, "agent.max_tokens 5 is reached"),
        ("rewrite", {"on_rewrite": "drop"}, "rewrite the history: the token at 6 is"),
        ("hang", {"timeout": 8}, "no answer after 8 s (agent.timeout): killed"),
    ],
)
def test_agents_mask_a_failed_one_and_leave_no_process(
    engine, tied_model, tmp_path, function, settings, failure
):
    with running_agents(engine, tied_model, tmp_path, function=function, **settings) as agents:
        samples, made = act(agents, engine, num_prompts=1)
        assert len(made.failures) == 2
        assert all(failure in each for each in made.failures), made.failures
        for sample in samples:
            assert sample.finish_reason == "failed" and failure in sample.failure
            assert math.isnan(sample.dialogue_reward)
        assert not sleepers()


def test_endpoint_gives_all_clients_the_same_turns(engine, tied_model, tmp_path):
    messages = [{"role": "user", "content": "one"}]
    with waiting_agents(engine, tied_model, tmp_path) as (url, key, made):
        anthropic = Anthropic(base_url=url, api_key=key, max_retries=0)
        openai = OpenAI(base_url=f"{url}/{key}/v1", api_key="none", max_retries=0)
        first = anthropic.messages.create(model="any", max_tokens=5, messages=messages)
        counted = anthropic.messages.count_tokens(model="any", messages=messages)
        assert counted.input_tokens == first.usage.input_tokens
        text = "".join(block.text for block in first.content)
        assert first.usage.output_tokens == len(made.record[0][0][1]) <= 5
        messages += [{"role": "assistant", "content": first.content}]
        messages += [{"role": "user", "content": [{"type": "text", "text": "two"}]}]
        with anthropic.messages.stream(model="any", max_tokens=9, messages=messages) as stream:
            streamed = "".join(stream.text_stream)
            usage = stream.get_final_message().usage
        # Sampled turns count with the tokens that were sampled.
        counted = anthropic.messages.count_tokens(model="any", messages=messages)
        assert counted.input_tokens == usage.input_tokens == len(made.record[0][1][0])
        chunks = openai.chat.completions.create(
            model="any",
            messages=[
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "two"},
                {"role": "assistant", "content": streamed},
                {"role": "user", "content": "three"},
            ],
            stream=True,
            n=2,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        logprobs = {0: [], 1: []}
        for chunk in chunks:
            for part in chunk.choices:
                logprobs[part.index] += [
                    token.logprob for token in (part.logprobs.content if part.logprobs else ())
                ]
        assert chunk.usage.completion_tokens == sum(map(len, logprobs.values()))
        assert [model.id for model in openai.models.list()] == [TINY_NAME]
    record = sorted(made.record[0], key=lambda each: len(each[0]))
    assert len(record) == 4
    for (before, ids, _), (after, _, _) in pairwise(record[:3]):
        assert after[: len(before) + len(ids)] == [*before, *ids]
    recorded = sorted(logprob for _, _, logprob in record[2:])
    assert recorded == sorted(logprobs.values())
    session = made.sessions[0]
    assert [len(branch.ends) for branch in session.tree.branches] == [3, 1]


USER = {"role": "user", "content": "x"}
CHAT, COMPLETIONS, ANTHROPIC = "chat/completions", "completions", "messages"


def part_of(kind):
    """A request's body: one message with one part of this kind."""
    return {"messages": [USER | {"content": [{"type": kind}]}]}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {}, "messages must be a list"),
        (CHAT, {"messages": [{"content": "x"}]}, "object with a role"),
        (CHAT, part_of("input_audio"), "parts of type text"),
        (CHAT, part_of("image_url"), "an image of a message is none of the row's 0"),
        (CHAT, {"logit_bias": {"1": 5}}, "logit_bias is not supported"),
        (CHAT, {"n": -1}, "n and max_tokens must be at least 1"),
        (CHAT, {"max_tokens": 0}, "n and max_tokens must be at least 1"),
        (CHAT, {"n": "2"}, "n must be a whole number, not '2'"),
        (CHAT, {"stop": {"a": 1}}, "stop must be a text, or a list of texts"),
        (CHAT, {"stop": ["a", "\ud83d"]}, "half of a surrogate pair"),
        (CHAT, {"temperature": math.nan}, "NaN is no value of JSON"),
        (CHAT, {"tools": "abc"}, "tools must be a list, not 'abc'"),
        (CHAT, {"messages": [USER], "tools": ["abc"]}, "each of tools must be an object with a f"),
        *((path, NESTED, "nested too deep") for path in (CHAT, COMPLETIONS, ANTHROPIC)),
        (ANTHROPIC, {"messages": "x"}, "messages must be a list of objects, not 'x'"),
        (ANTHROPIC, {"messages": [], "tools": ["abc"]}, "tools must be a list of objects"),
        (ANTHROPIC, part_of("redacted_thinking"), "only the model that wrote it can read it; leav"),
        (
            CHAT,
            {"messages": [USER], "tool_choice": "required"},
            "_choice required is not supported",
        ),
        (CHAT, {"messages": [USER | {"content": "x" * 1000}]}, "maximum context length is 350 tok"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt must be one text"),
        (ANTHROPIC, {"messages": [{"role": "user"}]}, "cannot be read"),
        (ANTHROPIC, "garbage", "cannot be read"),
    ],
)
def test_endpoint_refuses_a_request_and_says_why(waiting, path, body, text):
    url, key, _ = waiting
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]
    wrong = httpx.post(f"{url}/v1/{path}", content=content, headers={"x-api-key": "wrong"})
    assert wrong.status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a\ud83d"}]}),
        ("completions", {"prompt": "a\ud83d"}),
        ("messages", {"messages": [{"role": "user", "content": "a\ud83d"}], "system": "\udce9"}),
    ],
)
def test_endpoint_replaces_half_of_a_surrogate_pair(waiting, path, body):
    url, key, made = waiting
    others = {"model": "\ud83d", "metadata": {"\udce9": "\ud83d"}, "max_tokens": 1}
    content = json.dumps(body | others)
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    prompt = made.sessions[0].template.tokenizer.decode(made.record[0][-1][0])
    assert "a?" in prompt


def test_parse_finds_calls_by_the_engines_parser(engine, tied_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tied_model)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    tool = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    body = {"messages": [{"role": "user", "content": "one"}]}
    tools = {"tools": [{"type": "function", "function": tool}]}
    with running_agents(engine, tied_model, tmp_path, function="wait", parser="hermes") as agents:

        def message_of(text, request):
            ids = [*tokenizer.encode(text, add_special_tokens=False), EOS_ID]
            turn = Choice(ids, Logprobs([]), "stop", text, [])
            parsed = agents._parse(turn, request, engine.servers.base_urls[0])
            return agents._client.loop.call(parsed)

        found, plain = message_of(f"I add.{call}", body | tools), message_of("I cannot.", body)
        empty = message_of("", body | tools)
        broken = [
            message_of(call.replace('{"a": 1, "b": 2}', arguments), body | tools)
            for arguments in ("[1, 2]", '{"a": "\\ud83d"}')
        ]
        with pytest.raises(
            BadRequest, match=r"the turn cannot be parsed: .*answered .* with 4\d\d"
        ):
            message_of("I add.", body | {"tools": [{"type": "function", "function": {}}]})
    assert plain == {"role": "assistant", "content": "I cannot."}
    assert empty == {"role": "assistant", "content": ""}
    arguments = [each["tool_calls"][0]["function"]["arguments"] for each in broken]
    assert [*map(json.loads, arguments)] == [[1, 2], {"a": "?"}]
    assert (found["role"], found["content"].strip()) == ("assistant", "I add.")
    [parsed] = found["tool_calls"]
    assert (parsed["type"], parsed["function"]["name"]) == ("function", "add")
    assert json.loads(parsed["function"]["arguments"]) == {"a": 1, "b": 2}
    assert parsed["id"]


def test_pushes_in_flight_cut_turns_of_agents(engine, tied_model, other_model, tmp_path):
    with running_agents(engine, tied_model, tmp_path, function="long") as agents:
        weights = {engine.version: tied_model}
        made = generation_of(agents, engine, stop_token_ids=())

        def num_sampled():
            return sum(session.tree.num_sampled for session in made.sessions)

        with routing(agents._client, agents._tokenizer.decode) as router, made.recording():
            router.resume(engine.version)
            answered = router.submit(made)
            for folder in (other_model, tied_model):
                enough = num_sampled() + 100
                assert wait_until(lambda enough=enough: num_sampled() > enough, 60, 0.01)
                router.abort()
                weights[engine.push(folder)] = folder
                router.resume(engine.version)
            answered.result(120)
            samples = made.samples()
    assert made.failures == []
    assert max(len(sample.spans) for sample in samples) > 1
    for sample in samples:
        logprobs = torch.tensor(sample.logprobs)
        wanted = {
            version: reference_logprobs(folder, sample) for version, folder in weights.items()
        }
        versions = [version for version, count in sample.spans for _ in range(count)]
        assert (len(versions), sample.num_sampled) == (len(logprobs), 240)
        for i, (version, is_sampled) in enumerate(zip(versions, sample.loss_mask, strict=True)):
            assert not is_sampled or abs(logprobs[i] - wanted[version][i]) < 1e-3


def test_endpoint_drops_a_turn_that_nobody_waits_for(engine, tied_model, tmp_path):
    body = {"messages": [{"role": "user", "content": "one"}]}
    with waiting_agents(engine, tied_model, tmp_path, stop_token_ids=()) as (url, key, made):
        route, headers = f"{url}/v1/chat/completions", {"x-api-key": key}
        engine.pause()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(route, json=body, headers=headers, timeout=1)
        engine.resume()
        assert httpx.post(route, json=body | {"max_tokens": 3}, headers=headers).is_success
        assert wait_until(lambda: len(made.record[0]) == 1, 60)
        [branch] = made.sessions[0].tree.branches
        assert sum(branch.loss_mask) == 3


class Ending(Session):
    """A session that asserts that its sample is complete before it is over."""

    def __setattr__(self, name, value):
        assert name not in ("reward", "metrics", "failure", "finish_reason") or not self.is_over
        super().__setattr__(name, value)

    is_over = False


def test_session_has_its_reward_before_it_is_over():
    cfg = AgentConfig(command="unused", weight=1)
    group = SimpleNamespace(prompt=random_prompts(1)[0], params=sampling_params())
    session = Ending(group, 0, None, None, cfg, 9)
    session.end(0.5)
    assert session.is_over and session.failure and session.finish_reason == "failed"


@pytest.mark.slow
def test_agents_answer_many_sessions_at_once(engine, tied_model, tmp_path):
    (program := tmp_path / "agent.py").write_text(PROGRAM)
    command = f"{sys.executable} -IS {program}"
    with running_agents(engine, tied_model, tmp_path, command=command) as agents:
        samples, made = act(agents, engine, num_prompts=50, num_generations=4)
    assert (len(samples), made.failures) == (200, [])
    assert {sample.dialogue_reward for sample in samples} == {0.5}


@pytest.mark.slow
def test_agents_keep_the_routes_of_every_sequence(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    with (
        running_engine("reference", folder, tmp_path, router_replay=True) as engine,
        running_agents(engine, folder, tmp_path, function="fork") as agents,
    ):
        engine.push(folder)
        samples, made = act(agents, engine, router_replay=True)
        assert made.failures == []
        for sample in samples:
            assert len(sample.sequences) == 3
            routes = torch.from_numpy(sample.routes)
            for each, branch in zip(as_plain(sample), sample.sequences, strict=True):
                tokens = [*each.prompt.token_ids, *each.completion_ids]
                prompt = replace(sample.prompt, token_ids=tokens)
                [whole] = engine.generate(
                    [prompt], num_generations=1, max_completion_length=1, router_replay=True
                )
                first = len(sample.prompt.token_ids)
                bounds = [*branch.context, (first + branch.start, first + branch.end)]
                own = torch.cat([routes[start:end] for start, end in bounds])[: len(tokens) - 1]
                assert own.tolist() == whole.routes[: len(tokens) - 1].tolist()
