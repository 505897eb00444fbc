"""Dialogues of real engines with real environments, token by token."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from helpers.engines.live import (
    random_prompts,
    reference_logprobs,
    running_engine,
    sampling_params,
    wait_until,
)
from helpers.engines.sampling import Completions, generate, routing
from helpers.models.tiny import EOS_ID, character_tokenizer, tiny_model
from helpers.pushes.trainers import as_soon_as
from helpers.runs.environments import environment_pool
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.dialogue import DialogueGroup
from megatron_grpo.agents.turns import ObservationTemplate
from megatron_grpo.config.file import load_config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, turn_seed
from megatron_grpo.engines.engine import PROBE_INTERVAL
from megatron_grpo.engines.http import NoServingEngine, is_healthy
from megatron_grpo.launch.process import Preempted

pytestmark = [pytest.mark.engines, pytest.mark.fault]

END_IDS = (EOS_ID, *range(20, 60))  # 41 of 250 tokens end a turn: it has some six
SETTINGS = {"num_generations": 3, "max_completion_length": 150, "stop_token_ids": END_IDS}


class Recorded(Completions):
    """Dialogues that keep the requests to engines, by sample."""

    def __init__(self, prompts, params, environments, max_turns):
        super().__init__(
            prompts,
            params,
            new_group=partial(
                DialogueGroup, environments=environments, template=turns(), max_turns=max_turns
            ),
        )

    @property
    def requests(self) -> list[list[dict]]:
        return [
            requests
            for group in self.groups
            for _, requests in sorted(vars(group).get("requests", {}).items())
        ]

    @property
    def failures(self) -> list[str]:
        return [line for group in self.groups for line in group.failures]


@pytest.fixture(autouse=True)
def record(monkeypatch):
    """Groups keep the bodies of their requests."""
    request_of = DialogueGroup._request

    def noted(self, dialogue, url):
        request = request_of(self, dialogue, url)
        requests = self.__dict__.setdefault("requests", {})
        requests.setdefault(dialogue.sample_index, []).append(request.body)
        return request

    monkeypatch.setattr(DialogueGroup, "_request", noted)


def turns() -> ObservationTemplate:
    return ObservationTemplate.from_config(
        load_config(TINY_CONFIG, []), character_tokenizer(250), END_IDS
    )


def prompts_with(count: int, **columns) -> list[Prompt]:
    return [
        replace(p, row={"prompt": "hm", "answer": "1", **columns}) for p in random_prompts(count)
    ]


def generation_of(engine, environments, prompts: list[Prompt], max_turns=3, **settings) -> Recorded:
    params = sampling_params(policy_version=engine.version, **SETTINGS | settings)
    return Recorded(prompts, params, environments, max_turns)


def converse(engine, folder: Path, name: str, prompts: list[Prompt], pool=None, **settings):
    """Samples of dialogues with environments of class `name`, and their generation."""
    with environment_pool(folder, name, **(pool or {})) as environments:
        generation = generation_of(engine, environments, prompts, **settings)
        return generate(engine.client(), generation), generation


@pytest.fixture
def reference(reference_engine, tied_model):
    reference_engine.push(tied_model)
    return reference_engine


def spans(sample: Sample) -> list[tuple[bool, tuple[int, ...]]]:
    """Runs of sampled and of observed tokens: (is_sampled, tokens)."""
    tokens = zip(sample.loss_mask, sample.completion_ids, strict=True)
    runs = itertools.groupby(tokens, key=lambda each: bool(each[0]))
    return [(is_sampled, tuple(token for _, token in run)) for is_sampled, run in runs]


def test_dialogue_asks_for_each_turn_with_all_tokens_so_far(engine, tmp_path):
    prompts = prompts_with(3)
    samples, generation = converse(engine, tmp_path, "Echo", prompts)
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (p, i) for p in range(3) for i in range(3)
    ]
    tokenizer = character_tokenizer(250)
    assert any(len(s.step_rewards) == 3 for s in samples)
    for number, sample in enumerate(samples):
        inputs = [tuple(request["token_ids"]) for request in generation.requests[number]]
        whole = (*sample.prompt.token_ids, *sample.completion_ids)
        assert inputs[0] == (*sample.prompt.token_ids,)
        parts = spans(sample)
        assert [is_sampled for is_sampled, _ in parts] == [
            i % 2 == 0 for i in range(2 * len(sample.step_rewards) - 1)
        ]
        ends = [token for token, _ in sample.step_rewards]
        for turn, request in enumerate(inputs):
            assert whole[: len(request)] == request
            said = tokenizer.decode(parts[2 * turn][1][:-1], skip_special_tokens=True)
            assert sample.step_rewards[turn][1] == len(said)
            assert whole[len(request) :][: len(parts[2 * turn][1])] == parts[2 * turn][1]
            assert (
                len(sample.prompt.token_ids) + ends[turn]
                == len(request) + len(parts[2 * turn][1]) - 1
            )
            if turn + 1 < len(inputs):
                observed = f"\n<start>user\n{turn + 1}: {said}<eos>\n<start>assistant\n"
                assert tokenizer.decode(parts[2 * turn + 1][1]) == observed
                assert observed in sample.text
                assert sample.heard[turn + 1].texts == (f"{turn + 1}: {said}",)
                assert parts[2 * turn][1][-1] in END_IDS
        assert sample.dialogue_reward == sum(reward for _, reward in sample.step_rewards)
        assert len(whole) - len(sample.prompt.token_ids) <= 150
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        logprobs = torch.tensor(sample.logprobs)
        gap = (reference_logprobs(engine.folder, sample) - logprobs).abs()
        assert gap[mask].max() < 1e-4 and (logprobs[~mask] == 0).all()
    assert any(len(set(sample.loss_mask)) == 2 for sample in samples)


@pytest.mark.long
def test_push_waits_for_no_environment(live_engine, tied_model, other_model, tmp_path):
    versions = {tied_model: [live_engine.push(tied_model)], other_model: []}
    decode = AutoTokenizer.from_pretrained(tied_model).decode
    settings = {"stop_token_ids": END_IDS[:5], "max_completion_length": 300}
    with (
        environment_pool(tmp_path, "Slow") as environments,
        routing(live_engine.client(), decode) as router,
    ):
        generation = generation_of(live_engine, environments, prompts_with(2), **settings)
        router.resume(live_engine.version)
        answered, were_waiting = router.submit(generation), False
        for folder in itertools.cycle((other_model, tied_model)):
            live_engine.pause_after(100, answered.done)
            router.abort()
            were_waiting |= bool(environments._calls)
            versions[folder].append(live_engine.push(folder))
            router.resume(live_engine.version)
            if answered.done():
                break
        answered.result()
    assert were_waiting
    assert max(len(sample.step_rewards) for sample in generation.samples()) > 1
    has_cut_turn = False
    for sample in generation.samples():
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        version = torch.tensor([v for v, count in sample.spans for _ in range(count)])
        assert sample.policy_version == version[0] and (version.diff() >= 0).all()
        has_cut_turn |= bool((version.diff() * mask[1:] * mask[:-1]).any())
        for folder, numbers in versions.items():
            gap = reference_logprobs(folder, sample) - torch.tensor(sample.logprobs)
            own = mask & torch.isin(version, torch.tensor(numbers))
            assert (gap[own].abs() < 1e-3).all()
    assert has_cut_turn


@pytest.mark.long
def test_dialogues_repeat_to_the_bit(reference, tmp_path):
    prompts = prompts_with(4)

    def samples_of(engine, **settings):
        return converse(engine, tmp_path, "Echo", prompts, **settings)[0]

    first = samples_of(reference)
    assert samples_of(reference) == first
    said, others = (
        {tuple(s.completion_ids) for s in each} for each in (first, samples_of(reference, series=1))
    )
    assert len(said) == len(first) and not said & others


@pytest.mark.long
def test_dialogue_has_the_routes_of_all_its_turns(tmp_path):
    folder = tiny_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    prompts = [*prompts_with(2), *prompts_with(1, first="x" * 1000)]
    with running_engine("reference", folder, tmp_path, router_replay=True) as engine:
        engine.push(folder)

        samples, generation = converse(engine, tmp_path, "Echo", prompts, router_replay=True)
        assert {s.finish_reason for s in samples[6:]} == {"failed"}  # before the first request
        assert all(s.routes is None for s in samples[6:])
        for number, sample in enumerate(samples[:6]):
            tokens = (*sample.prompt.token_ids, *sample.completion_ids)
            sent = [request["sampling_params"] for request in generation.requests[number]]
            ends = [token for token, _ in sample.step_rewards]
            starts = [params["routed_experts_prompt_start"] for params in sent]
            # A turn's routes begin at the last token of the turn before, which was not read yet.
            assert starts == [0, *(len(sample.prompt.token_ids) + end for end in ends[:-1])]
            prompt = replace(sample.prompt, token_ids=tokens[:-1])
            [whole] = engine.generate(
                [prompt], num_generations=1, max_completion_length=1, router_replay=True
            )
            np.testing.assert_array_equal(sample.routes, whole.routes)
        # This engine sends routes with every answer; an evaluation drops them.
        samples, _ = converse(engine, tmp_path, "Echo", prompts[:1])
        assert not any(sample.routes is not None for sample in samples)


def test_step_gets_tokens_finish_reason_and_tokens_left(reference, tmp_path):
    samples, _ = converse(reference, tmp_path, "Attentive", prompts_with(4))
    decode = character_tokenizer(250).decode
    heard = [sample for sample in samples if len(sample.step_rewards) > 1]
    assert heard  # elsewhere the observation had no room
    for sample in heard:
        end = sample.step_rewards[0][0] + 1
        said = [*sample.completion_ids[:end]]
        text = decode(said[:-1], skip_special_tokens=True)
        assert f"{text}: stop {said} {150 - end}" in sample.text


def test_every_turn_of_every_sample_has_its_own_seed():
    seeds = [turn_seed(*which) for which in itertools.product(range(3), repeat=5)]
    assert len(set(seeds)) == 3**5 and max(seeds) < 2**62


@pytest.mark.long
def test_dialogue_ends_when_done_at_max_turns_or_without_room(reference, tmp_path):
    def ask(**settings) -> list[Sample]:
        return converse(reference, tmp_path, "Echo", prompts_with(4), **settings)[0]

    samples = ask()
    assert {s.finish_reason for s in samples} <= {"max_turns", "length"}
    assert all(len(s.step_rewards) == 3 for s in samples if s.finish_reason == "max_turns")
    samples = ask(pool={"arguments": {"last": 2}})
    assert {len(s.step_rewards) for s in samples if s.finish_reason == "stop"} == {2}
    samples = ask(max_completion_length=40, max_turns=9)
    assert {s.finish_reason for s in samples} == {"length"}
    for sample in samples:
        # The last observation is left out when no turn can follow it.
        assert len(sample.completion_ids) <= 40 and sample.loss_mask[-1]
        assert sample.step_rewards[-1][0] == len(sample.completion_ids) - 1


def test_first_observation_is_part_of_the_prompt(reference, tmp_path):
    for sample in converse(reference, tmp_path, "Echo", prompts_with(1, first=", and more"))[0]:
        assert sample.prompt.text == "<start>user\nhm, and more<eos>\n<start>assistant\n"
        assert sample.loss_mask[0]
    too_long = prompts_with(1, first="x" * 1000)
    samples, generation = converse(reference, tmp_path, "Echo", too_long)
    assert {s.finish_reason for s in samples} == {"failed"}
    assert ": reset: its first observation is " in generation.failures[0]
    assert "tokens too long" in generation.failures[0]
    # The packed prompt must not keep the observation that does not fit.
    assert all(s.prompt.token_ids == too_long[0].token_ids for s in samples)


@pytest.mark.parametrize(("deed", "turn"), [("fail", 0), ("die", 2)])
def test_failing_environment_fails_its_sample(reference, tmp_path, deed, turn):
    good = prompts_with(1, deed="go_on", turn=1)
    bad = [replace(p, index=1) for p in prompts_with(1, deed=deed, turn=turn)]
    samples, generation = converse(reference, tmp_path, "Odd", [*good, *bad])
    failed = [s for s in samples if s.finish_reason == "failed"]
    assert failed and {s.prompt.index for s in failed} == {1}
    assert all(math.isnan(s.dialogue_reward) for s in failed)
    assert all(math.isfinite(s.dialogue_reward) for s in samples if s not in failed)
    assert len(generation.failures) == len(failed)
    where = f"turn {turn}" if turn else "reset"
    assert generation.failures == [
        f"prompt 1, sample {s.sample_index}: {s.failure}" for s in failed
    ]
    assert all(s.failure.startswith(f"{where}: ") for s in failed)
    if turn == 0:
        assert len(failed) == 3 and not any(s.completion_ids for s in failed)


@pytest.mark.long
def test_dialogues_run_at_the_same_time(reference, tmp_path):
    (begun := tmp_path / "begun").mkdir()
    pool, settings = {"arguments": {"folder": str(begun)}}, {"num_generations": 8, "max_turns": 2}
    samples, _ = converse(reference, tmp_path, "Together", prompts_with(12), pool=pool, **settings)
    assert {s.finish_reason for s in samples} <= {"max_turns", "length"}
    assert sum(len(s.step_rewards) for s in samples) > len(samples) == 96


def test_generation_is_cancelled_at_once(reference, tmp_path):
    client = reference.client()
    with environment_pool(tmp_path, "Odd") as environments:
        prompts = prompts_with(2, deed="hang", turn=1)
        generation = generation_of(reference, environments, prompts)
        start = time.monotonic()
        with (
            as_soon_as(lambda: generation.engines, client.cancel),
            pytest.raises(Preempted),
        ):
            generate(client, generation)
        assert time.monotonic() - start < 40  # far below environment.timeout


def without_logprobs(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, logprobs=sample.loss_mask) for sample in samples]


def steps_taken(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("num_lost", [1, 2])
def test_dialogue_goes_on_at_another_engine(pair, tmp_path, num_lost):
    prompts, file, urls = prompts_with(12), tmp_path / "steps", pair.servers.base_urls
    with environment_pool(tmp_path, "Counting", arguments={"file": str(file)}) as environments:
        undisturbed = generate(pair.client, generation_of(pair, environments, prompts))
        file.unlink()
        generation = generation_of(pair, environments, prompts)

        def kill() -> None:
            for url in urls[:num_lost]:
                pair.servers.processes[url].process.kill()

        with as_soon_as(lambda: len(generation.engines) == 2, kill):
            if num_lost == 2:
                with pytest.raises(NoServingEngine):
                    generate(pair.client, generation)
            else:
                samples = generate(pair.client, generation)
        if num_lost == 2:
            taken = len(steps_taken(file))
            assert 0 < taken < sum(len(s.step_rewards) for s in undisturbed)
            pair.push_again()
            samples = generate(pair.client, generation)
    # Requests that are sent again are batched with others, so their sums round differently.
    assert without_logprobs(samples) == without_logprobs(undisturbed)
    for again, before in zip(samples, undisturbed, strict=True):
        assert [*again.logprobs] == pytest.approx([*before.logprobs], abs=1e-5)
    taken = steps_taken(file)
    assert len(taken) == len(set(taken)) == sum(len(s.step_rewards) for s in samples)
    assert wait_until(lambda: all(map(is_healthy, urls)), seconds=60)
    pair.push()


@pytest.mark.slow
def test_engine_that_waits_for_environments_does_not_hang(reference, tmp_path):
    slow = {"arguments": {"seconds": 4 * PROBE_INTERVAL}}  # several probes find no new token
    with environment_pool(tmp_path, "Slow", **slow) as environments:
        generation = generation_of(reference, environments, prompts_with(1), max_turns=2)
        samples = generate(reference.client(stall_timeout=1.5), generation)
    assert max(len(sample.step_rewards) for sample in samples) == 2  # a turn follows the slow step
