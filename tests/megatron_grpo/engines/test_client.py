"""Token ids in, samples out, over HTTP: against a real vLLM and the reference engine."""

import asyncio
import math
import socket
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_convert import read_shape
from helpers.engines.live import largest_logprob_error, random_prompts
from helpers.models.tiny import EOS_ID, character_tokenizer
from helpers.pushes.policies import client_of
from megatron_grpo.config.reward import RewardFunction
from megatron_grpo.engines.http import EngineError
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.rewards.functions import load_function

pytestmark = [pytest.mark.engines, pytest.mark.both_engines]

TOKEN = "0123456789abcdef"


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampled_tokens_after_temperature(engine, temperature):
    samples = engine.generate(random_prompts(6), temperature=temperature)
    assert largest_logprob_error(engine.folder, samples, temperature) < 1e-4
    assert {s.policy_version for s in samples} == {engine.version}


def tokens_left(row, top_p, top_k):
    """Indices of the tokens that remain after top-p and top-k, by definition."""
    ranked = sorted(range(len(row)), key=lambda token: -row[token])
    ranked = ranked[:top_k] if top_k != -1 else ranked
    mass, total, left = 0.0, sum(math.exp(row[token]) for token in ranked), []
    for token in ranked:
        if mass >= top_p * total:
            break
        left.append(token)
        mass += math.exp(row[token])
    return left


@pytest.mark.parametrize(("top_p", "top_k"), [(0.4, -1), (0.6, 20)])
def test_top_p_and_top_k_keep_the_likeliest_tokens_and_renormalize(engine, top_p, top_k):
    if engine.rollout.engine == "sglang":
        pytest.skip("SGLang tells log-probabilities of before the cut; training cuts nothing")
    samples = engine.generate(random_prompts(4), temperature=0.8, top_p=top_p, top_k=top_k)
    model = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    is_cut = False
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, -len(sample.completion_ids) - 1 : -1]
        rows = torch.log_softmax(logits.double() / 0.8, -1).tolist()
        for row, token, logprob in zip(rows, sample.completion_ids, sample.logprobs, strict=True):
            left = tokens_left(row, top_p, top_k)
            assert token in left
            total = sum(math.exp(row[other]) for other in left)
            assert logprob == pytest.approx(row[token] - math.log(total), abs=1e-3)
            is_cut |= len(left) < len(row)
    assert is_cut and len({tuple(sample.completion_ids) for sample in samples}) > len(samples) / 2


def test_a_completion_cut_by_the_engines_context_is_an_error(live_engine, tied_model):
    """A longer prompt is refused, not cut. The engine serves on after both."""
    live_engine.push(tied_model)
    [url] = live_engine.servers.base_urls
    context = read_shape(tied_model).max_position_embeddings  # vLLM's default
    too_long = random_prompts(1, lengths=(context + 1, context + 2))
    with pytest.raises(EngineError, match=rf"{url} answered .* with 400"):
        live_engine.generate([*random_prompts(3), *too_long])
    prompts = random_prompts(1, lengths=(context - 12, context - 11))
    error = rf"{url} ended a completion after 12 of 16 tokens: .*max_m"
    if live_engine.rollout.engine == "sglang":
        error = "answered /inference/v1/generate with 400: .*exceeds the model's maximum context"
    with pytest.raises(EngineError, match=error):
        live_engine.generate(prompts)
    assert len(live_engine.generate(prompts, max_completion_length=4)) == 4


def test_a_completion_ends_with_the_first_end_token_and_includes_it(engine):
    end_ids = (EOS_ID, *range(20, 60))
    settings = {"max_completion_length": 12, "num_generations": 16}
    samples = engine.generate(random_prompts(6), stop_token_ids=end_ids, **settings)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    tokenizer = AutoTokenizer.from_pretrained(engine.folder)
    for s in samples:
        stopped = s.finish_reason == "stop"
        assert len(s.logprobs) == len(s.completion_ids)
        assert stopped or len(s.completion_ids) == 12
        assert [t in end_ids for t in s.completion_ids] == [
            *[False] * (len(s.completion_ids) - 1),
            stopped,
        ]
        shown = s.completion_ids[:-1] if stopped else s.completion_ids
        assert s.text == tokenizer.decode(shown, skip_special_tokens=True)


def test_a_completion_ends_with_the_first_stop_string_and_includes_it(live_engine, tied_model):
    live_engine.push(tied_model)
    tokenizer = AutoTokenizer.from_pretrained(tied_model)
    # SGLang also looks into the text of special tokens, such as <pad>.
    stop = [text for token in range(20, 52) if (text := tokenizer.decode([token])) not in "<>"]
    samples = live_engine.generate(random_prompts(6), num_generations=16, stop=stop)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for s in samples:
        assert s.text == tokenizer.decode(list(s.completion_ids), skip_special_tokens=True)
        stops = s.finish_reason == "stop" and s.completion_ids[-1] != EOS_ID
        assert sum(s.text.count(each) for each in stop) == s.text.endswith(tuple(stop)) == stops


def test_end_tokens_are_only_those_given(engine):
    unreachable = (249,)
    samples = engine.generate(random_prompts(8), stop_token_ids=unreachable, num_generations=16)
    assert any(EOS_ID in s.completion_ids[:-1] for s in samples)


def test_every_sample_has_its_own_seed_which_repeats(engine, seeds):
    def completions(**overrides):
        return [tuple(s.completion_ids) for s in engine.generate(random_prompts(3), **overrides)]

    first = completions()
    assert completions() == first
    assert len(set(first)) == len(first)
    assert not set(completions(series=1)) & set(first)
    assert not set(completions(seed=1)) & set(first)


@pytest.mark.long
def test_vllm_repeats_a_generation_to_the_last_bit(live_engine, tied_model, seeds):
    # More prompt tokens than one step of vLLM takes: the order of requests matters, too.
    prompts = random_prompts(80, lengths=(20, 80))
    live_engine.push(tied_model)
    runs = [live_engine.generate(prompts, num_generations=2) for _ in range(4)]
    assert all(run == runs[0] for run in runs)


def test_greedy_completions_are_the_same_everywhere(live_engine, reference_engine, tied_model):
    prompts = random_prompts(6)
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        inputs = torch.tensor([prompt.token_ids])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=16
        )
        expected.append(output[0, len(prompt.token_ids) :].tolist())
    for engine in (live_engine, reference_engine):
        engine.push(tied_model)
        samples = engine.generate(prompts, num_generations=1, temperature=0.0)
        assert [list(s.completion_ids) for s in samples] == expected


def test_an_unreachable_engine_is_named_within_seconds():
    start = time.monotonic()
    with reserve_port() as unheard:
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"{url} cannot be reached"):
            client_of([url], TOKEN).describe_parameters()
    assert time.monotonic() - start < 30


def test_an_engine_that_does_not_answer_in_time_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = client_of([url], TOKEN, request_timeout=0.2)
        with pytest.raises(
            EngineError, match=rf"{url} did not answer /collective_rpc within 0.2 s"
        ):
            client.describe_parameters()


def test_vllm_is_a_judge(live_engine, monkeypatch):
    """With the engine's token; the tiny model is restricted to digits."""
    if live_engine.rollout.engine != "vllm":
        pytest.skip("the list of tokens that a model may say is an extension of vLLM's")
    monkeypatch.setenv("ENGINE_TOKEN", live_engine.servers.token)
    digits = character_tokenizer(250).convert_tokens_to_ids(list("0123456789"))
    arguments = {
        "base_url": f"{live_engine.servers.base_urls[0]}/v1",
        "model": str(live_engine.folder),
        "prompt": "{prompt}? {completion}",
        "max_score": 9,
        "api_key_env": "ENGINE_TOKEN",
        "extra_body": {"max_tokens": 1, "allowed_token_ids": digits},
    }
    judge = load_function(RewardFunction(name="judge", arguments=arguments))
    columns = {"completions": ["yes", "no", "yes", "a b c"], "prompts": ["p"] * 4}
    live_engine.push(live_engine.folder)
    judged = asyncio.run(judge.call_async(columns, 60)).scores
    assert {round(9 * score, 9) for score in judged} <= set(range(10))
    assert judged[0] == judged[2]  # the same text at temperature 0
    assert judged == asyncio.run(judge.call_async(columns, 60)).scores
