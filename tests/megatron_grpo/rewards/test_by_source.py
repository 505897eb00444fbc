"""Samples of several sources in one generation, each scored by its own functions."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from math import isnan

import pytest
import torch

from helpers.runs.rewards import sample_of
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.batch.experience import (
    compute_advantages,
    dialogue_metrics,
    source_metrics,
)
from megatron_grpo.config.file import load_config
from megatron_grpo.data.samples import Sample
from megatron_grpo.reporting.metrics import reward_metrics
from megatron_grpo.rewards.by_source import RewardsBySource
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


def test_each_source_has_its_own_functions_weights_bounds_and_metrics():
    made = samples()
    with closing(RewardPools()) as pools:
        rewards = RewardsBySource(CONFIG.by_source, pools)
        scores = rewards.score(made, num_completions=len(made))
    assert [[*score] for score in scores] == [["exact"]] * 2 + [["environment"]] * 2 + [
        ["format"]
    ] * 2
    totals = rewards.totals(made, scores)
    assert totals[:3] == [1.5, 0.0, 3 * 0.75]
    assert isnan(totals[3])
    assert totals[4:] == [1.0, 0.0]
    experience = compute_advantages(made, scores, totals, CONFIG)
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
    # Of a completion of one turn nothing is counted here.
    found = dialogue_metrics(made, scores)
    assert (found["num_turns/mean"], found["environment/failed_ratio"]) == (1.0, 0.5)


def test_a_generation_and_an_evaluation_may_be_scored_at_the_same_time():
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
