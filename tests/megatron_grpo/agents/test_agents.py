"""Agents with real clients at a real engine: what is trained on is what was sampled."""

from collections import Counter

import pytest
import torch

from helpers.agents import act, as_plain, running_agents
from helpers.engines import reference_logprobs


@pytest.fixture
def engine(live_engine, tied_model):
    live_engine.push(tied_model)
    return live_engine


def trained_on(sample):
    """Each token that a sample is trained on with all before it, and its log-probability."""
    found = []
    for each in as_plain(sample):
        tokens = [*each.prompt.token_ids, *each.completion_ids]
        start = len(each.prompt.token_ids)
        for i, (is_sampled, logprob) in enumerate(zip(each.loss_mask, each.logprobs, strict=True)):
            if is_sampled:
                found.append((tuple(tokens[: start + i + 1]), round(logprob, 5)))
    return found


def check_exact(samples, made, model):
    """Every sampled token is trained on once, after the very tokens that the engine had."""
    for number, sample in enumerate(samples):
        record = made.record[number]
        told = [
            (tuple([*asked, *ids[: i + 1]]), round(logprobs[i], 5))
            for asked, ids, logprobs in record
            for i in range(len(ids))
        ]
        assert Counter(trained_on(sample)) == Counter(told)
        assert sum(count for _, count in sample.spans) == len(sample.completion_ids)
        assert len(sample.step_rewards) == len(record)
        for each in as_plain(sample):
            gap = reference_logprobs(model, each) - torch.tensor(each.logprobs)
            assert (gap.abs() * torch.tensor(each.loss_mask)).max() < 1e-4


@pytest.mark.parametrize(
    ("function", "num_turns", "num_sequences", "reward"),
    [
        ("append", 3, 1, 0.5),
        ("fork", 5, 3, 1.0),
        ("rewrite", 4, 3, 0.25),
        ("complete", 3, None, 1.0),
    ],
)
def test_every_sampled_token_is_trained_on_once(
    engine, tied_model, tmp_path, function, num_turns, num_sequences, reward
):
    with running_agents(engine, tied_model, tmp_path, function=function) as agents:
        samples, made = act(agents, engine)
    assert made.failures == []
    assert [(s.prompt.index, s.sample_index) for s in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    check_exact(samples, made, tied_model)
    for sample in samples:
        assert len(sample.step_rewards) == num_turns
        assert (sample.finish_reason, sample.dialogue_reward) == ("stop", reward)
        if num_sequences:
            assert len(sample.sequences) == num_sequences
