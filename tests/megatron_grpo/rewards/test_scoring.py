"""Scores of a generation as they come in, their sum, and the tokens that end steps."""

import math
import random
from dataclasses import replace

import pytest

from helpers.runs.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.rewards.functions import Answer
from megatron_grpo.rewards.scoring import (
    RewardError,
    Scores,
    Scoring,
    token_ends,
    total_rewards,
    with_steps,
)


def scoring(num_completions: int, max_failed_fraction: float = 0.1) -> Scoring:
    """Completions of one prompt, for a function of steps and one without."""
    functions = (
        RewardFunction(name="reward_model", arguments={"base_url": "http://h", "step_tag": "§"}),
        RewardFunction(name="exact"),
    )
    cfg = RewardConfig(functions=functions, max_failed_fraction=max_failed_fraction)
    samples = [sample_of("A", {}, 0, number) for number in range(num_completions)]
    return Scoring(samples, cfg, set(), num_completions)


def test_record_keeps_steps_with_scores_and_the_configs_order_of_functions():
    found = scoring(2)
    of_steps, exact = found.calls
    found.record(exact, Answer([1.0, 0.0]))
    found.record(of_steps, Answer([0.5, 0.75], steps=[[(1, 0.5)], [(1, 0.75)]]))
    assert [[*score.items()] for score in found.scores] == [
        [("reward_model", 0.5), ("exact", 1.0)],
        [("reward_model", 0.75), ("exact", 0.0)],
    ]
    assert [score.steps for score in found.scores] == [[(1, 0.5)], [(1, 0.75)]]


def failed(number: int) -> Answer:
    """An answer for 100 completions, of which the first have no score."""
    return Answer([math.nan] * number + [1.0] * (100 - number), f"the error of {number}")


def test_record_masks_failed_scores_up_to_the_limit_and_stops_the_run_beyond_it(capsys):
    found = scoring(100, max_failed_fraction=0.29)  # 0.29 * 100 is less than 29 in floats
    for call in found.calls:
        found.record(call, failed(29))  # a completion with two failed scores counts once
    assert sum(math.isnan(score["exact"]) for score in found.scores) == 29
    assert capsys.readouterr().err.count("the error of 29") == 2  # once for each function
    with pytest.raises(RewardError) as stopped:
        found.record(found.calls[1], failed(30))
    assert str(stopped.value) == (
        "reward function reward_model on prompt 0 ('prompt 0'): the error of 29\n"
        "completions: ['A', 'A', 'A', 'A', ...]\n"
        "30 of 100 completions have no score so far: more than reward.max_failed_fraction 0.29 "
        "allows: fix the failure shown above, or raise that limit if failures are to be expected "
        "(it must be below 1)"
    )


def test_total_rewards_are_weighted_sums_in_bounds_and_nan_with_a_failed_score():
    functions = [
        RewardFunction(name="exact", weight=0.0),
        RewardFunction(name="f.py:f", weight=2.0),
    ]
    scores = [{"exact": 1.0, "f": 2.0}, {"exact": 3.0, "f": -1.0}, {"exact": math.nan, "f": 1.0}]
    for bounds, totals in ((None, [4, -2]), ((-1.5, 3), [3, -1.5])):
        assert total_rewards(scores, functions, bounds) == pytest.approx(
            [*totals, math.nan], nan_ok=True
        )


def test_token_ends_are_the_tokens_that_reach_a_length_of_text():
    chance = random.Random(0)
    token_ids = [chance.randrange(4) for _ in range(1000)]

    def decode(ids):
        return "".join("x" * token for token in ids)  # some tokens have no text

    lengths = [len(decode(token_ids[: number + 1])) for number in range(len(token_ids))]
    ends = sorted(chance.sample(range(1, lengths[-1] + 1), 40))
    expected = [next(i for i, n in enumerate(lengths) if n >= end) for end in ends]
    assert token_ends(token_ids, ends, decode) == expected


def test_with_steps_rewards_the_tokens_that_end_steps_the_last_with_the_end_token():
    def sample(text: str, length: int):
        tokens = {"completion_ids": range(length), "logprobs": [0.0] * length}
        return replace(sample_of(text, {}), **tokens, loss_mask=())

    of_two, of_none, unscored = Scores(), Scores(), Scores()
    of_two.steps, of_none.steps = [(3, 0.5), (4, 0.25)], [(0, 1.0)]
    samples = [sample("A\n\nB", 5), sample("", 0), sample("C", 2)]
    found = with_steps(samples, [of_two, of_none, unscored], lambda ids: "A\n\nB"[: len(ids)])
    assert [each.step_rewards for each in found] == [((2, 0.5), (4, 0.25)), (), ()]
    dialogue = replace(samples[2], step_rewards=((1, 1.0),))  # of another source
    [_, kept] = with_steps([samples[0], dialogue], [of_two, unscored], lambda ids: "A\n\nB")
    assert kept is dialogue
    assert with_steps(samples, [Scores(), Scores(), Scores()], str) is samples
