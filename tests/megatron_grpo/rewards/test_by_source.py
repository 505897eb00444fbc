"""Samples of several sources in one generation, each scored by its source's functions, and
reference answers that functions cannot read."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from math import isnan

import pytest
import torch

from helpers.runs.rewards import sample_of
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.experience import (
    compute_advantages,
    dialogue_metrics,
    source_metrics,
)
from megatron_grpo.config.file import load_config
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.reporting.metrics import reward_metrics
from megatron_grpo.rewards.by_source import RewardsBySource, reference_fault
from megatron_grpo.rewards.math import can_read, math_answer
from megatron_grpo.rewards.pool import RewardPools

CONFIG = load_config(
    TINY_CONFIG,
    [
        "grpo.num_generations=2",
        "reward.functions=[]",
        "sources.column=data_source",
        "sources.by_name.math.reward={functions: [{name: exact, weight: 2}], clip_range: [0, 1.5]}",
        "sources.by_name.game.environment={name: game.py:Game, weight: 3}",
        "sources.by_name.form.reward.functions=[{name: format, arguments: {pattern: a+}}]",
    ],
)
TEXTS = {"math": ["5", "6"], "game": ["left", "right"], "form": ["aaa", "b"]}
"""Two completions of a prompt of each source."""


def samples() -> list[Sample]:
    made = []
    for index, (source, texts) in enumerate(TEXTS.items()):
        for number, text in enumerate(texts):
            sample = sample_of(text, {"answer": "5", "data_source": source}, index, number)
            made.append(replace(sample, prompt=replace(sample.prompt, source=source)))
    # The environment of the second has failed.
    made[2] = replace(made[2], step_rewards=((0, 0.25), (0, 0.5)))
    made[3] = replace(made[3], finish_reason="failed")
    return made


def test_score_has_functions_weights_and_bounds_by_source():
    made = samples()
    with closing(RewardPools()) as pools:
        rewards = RewardsBySource(CONFIG.by_source, pools)
        scores = rewards.score(made, num_completions=len(made))
    names = ["exact", "exact", "environment", "environment", "format", "format"]
    assert [[*score] for score in scores] == [[name] for name in names]
    totals = rewards.totals(made, scores)
    assert totals[:3] == [1.5, 0.0, 3 * 0.75]
    assert isnan(totals[3])
    assert totals[4:] == [1.0, 0.0]
    experience = compute_advantages(made, scores, totals, AdvantageFunction.of(CONFIG))
    assert experience.advantages[:2].sum() == 0 < experience.advantages[0]
    found = source_metrics(experience)
    assert {name: value for name, value in found.items() if "game" in name} == {
        "source/game/share": pytest.approx(1 / 3),
        "source/game/completions/mean_length": 1.0,
        "source/game/num_turns/mean": 1.5,
        "source/game/reward": 2.25,
    }
    of_groups = (experience.totals, experience.group_ids, torch.zeros(6))
    found = reward_metrics(scores, *of_groups, CONFIG.reward_labels)
    assert (found["reward/exact/mean"], found["reward/environment/mean"]) == (0.5, 0.75)
    # A completion of one turn does not count here.
    found = dialogue_metrics(made, scores)
    assert (found["num_turns/mean"], found["environment/failed_ratio"]) == (1.0, 0.5)


def test_score_may_be_called_by_threads_at_once():
    made = samples()
    with closing(RewardPools()) as pools, ThreadPoolExecutor(4) as threads:
        rewards = [RewardsBySource(CONFIG.by_source, pools) for _ in range(2)]
        size = len(made)
        alone = rewards[0].score(made, num_completions=size)
        found = [
            threads.submit(rewards[i % 2].score, made[::-1], num_completions=size)
            for i in range(20)
        ]
        assert all(str(each.result()) == str(alone[::-1]) for each in found)


UNREADABLE = ["", "####", " \n", "$", "$$", "By induction\nit is so"]
READABLE = ["even", "xy + yz", "\\$18.90", "costs $18", "It is\n18", "thus \\boxed{x}", 7]
READABLE += ["$x$ or\n$y$"]


def fault(answer: object, *functions: object) -> str | None:
    found = reference_fault(RewardConfig(functions=list(functions)))({"answer": answer})
    return found and str(found)


@pytest.mark.parametrize("answer", UNREADABLE)
def test_reference_fault_is_of_an_unreadable_answer(answer):
    with pytest.raises(ValueError, match="no mathematical answer"):
        math_answer(["1"], [answer], ["stop"])
    message = f"no answer that math_answer can read: {answer!r}"
    assert fault(answer, "exact", "math_answer") == message
    cosine = {"name": "cosine", "arguments": {"cosine_max_len": 9}}
    assert fault(answer, cosine) == message.replace("math_answer", "cosine")


@pytest.mark.parametrize("answer", READABLE)
def test_can_read_what_math_answer_reads(answer):
    assert can_read(answer)
    math_answer(["1"], [answer], ["stop"])


def test_reference_fault_is_none_without_mathematics():
    by_text = {"name": "cosine", "arguments": {"cosine_max_len": 9, "accuracy": "exact"}}
    assert fault("####", "exact", by_text) is None
    assert reference_fault(RewardConfig(functions=["math_answer"]))({"prompt": "no answer"}) is None
