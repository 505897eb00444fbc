"""Sampling with `transformers`, as in the reference engine."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models.tiny import EOS_ID
from reference_engine.sampling import sample

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tied_model):
    return AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)


def run(model, **overrides):
    arguments = {
        "seeds": [7, 8, 9, 10],
        "temperature": 1.0,
        "max_tokens": 12,
        "stop_token_ids": [EOS_ID],
    }
    return sample(model, PROMPT, **(arguments | overrides))


def test_the_others_go_on_when_one_has_ended(model):
    endless = run(model, seeds=[*range(8)], stop_token_ids=[])
    end = endless[0].token_ids[3]
    for (tokens, logprobs, _), (full, full_logprobs, _) in zip(
        run(model, seeds=[*range(8)], stop_token_ids=[end]), endless, strict=True
    ):
        length = full.index(end) + 1 if end in full else 12
        assert tokens == full[:length]
        assert logprobs == pytest.approx(full_logprobs[:length], abs=1e-5)


def test_tokens_are_drawn_with_their_probabilities(model):
    n, temperature = 4000, 0.5
    completions = run(model, seeds=[*range(n)], max_tokens=1, temperature=temperature)
    draws = torch.tensor([each.token_ids for each in completions])
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    expected = n * torch.softmax(logits / temperature, -1)
    counts = torch.bincount(draws[:, 0], minlength=len(expected)).float()
    # Pearson's statistic over the common tokens stays near their number when the draw is right.
    common = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[common].sum()
    assert statistic < common.sum() + 5 * (2 * common.sum()) ** 0.5
