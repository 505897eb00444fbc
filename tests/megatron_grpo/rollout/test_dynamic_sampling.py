"""Which prompts replace those whose completions all have the same reward."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_grpo.config.data import WeightedPath
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.rollout.dynamic_sampling import DynamicSampler, ScoredGroup

NUM_PROMPTS, BATCH_SIZE = 40, 8


def stream(num_prompts: int = NUM_PROMPTS) -> PromptStream:
    prompts = [Prompt(index=i, token_ids=(i,), text="", row={}) for i in range(num_prompts)]
    return PromptStream(prompts, BATCH_SIZE, seed=1, shuffle=True)


def mixture() -> PromptStream:
    """Three prompts of 0 to 29 for one of 30 to 39."""
    paths = [WeightedPath(path="a", weight=3), WeightedPath(path="b", weight=1)]
    prompts = [replace(prompt, path=int(prompt.index >= 30)) for prompt in stream().prompts]
    return PromptStream(prompts, BATCH_SIZE, seed=1, shuffle=True, paths=paths)


def config(**options) -> GRPOConfig:
    options = {"dynamic_sample": True} | options
    return GRPOConfig(num_generations=2, generation_batch_size=2 * BATCH_SIZE, **options)


def scored(prompts, is_useful) -> list[ScoredGroup]:
    """Groups with and without spread; samples are identified by their prompt."""
    return [ScoredGroup([p], [{}], [0.1, 0.9 if is_useful(p) else 0.1]) for p in prompts]


def found(sampler: DynamicSampler) -> list[int]:
    return [group.samples[0].index for group in sampler.groups()]


def run(
    is_useful, num_prompts: int = NUM_PROMPTS, **options
) -> tuple[DynamicSampler, list[list[int]]]:
    sampler, rounds = DynamicSampler(stream(num_prompts), 3, config(**options)), []
    while sampler.prompts:
        rounds.append([prompt.index for prompt in sampler.prompts])
        sampler.add_groups(scored(sampler.prompts, is_useful))
    return sampler, rounds


def test_without_dynamic_sampling_there_is_one_round_and_every_group_stays():
    sampler, rounds = run(lambda prompt: False, dynamic_sample=False)
    assert rounds == [[prompt.index for prompt in stream().batch(3)]]
    assert found(sampler) == rounds[0]


def test_replacements_of_a_mixture_have_its_proportions():
    sampler = DynamicSampler(mixture(), 3, config(dynamic_sample_oversampling=2.0))
    sampler.add_groups(scored(sampler.prompts, lambda prompt: False))
    assert sum(prompt.index >= 30 for prompt in sampler.prompts) == 4 == len(sampler.prompts) / 4
    assert len({prompt.index for prompt in sampler.prompts}) == 16


def test_prompts_without_spread_are_replaced_by_as_many_that_were_not_tried():
    sampler, rounds = run(lambda prompt: prompt.index % 2 == 0)
    tried = [index for indices in rounds for index in indices]
    assert len(tried) == len(set(tried))
    for indices, following in pairwise(rounds):
        useful_so_far = [i for i in tried[: tried.index(indices[-1]) + 1] if i % 2 == 0]
        assert len(following) == BATCH_SIZE - len(useful_so_far)
    assert len(found(sampler)) == BATCH_SIZE
    assert sampler.num_replaced == len(tried) - BATCH_SIZE
    replaced = [group.samples[0].index for group in sampler.replaced()]
    assert sorted(replaced + found(sampler)) == sorted(tried)


def test_after_the_last_round_groups_of_equal_rewards_fill_the_generation():
    sampler, rounds = run(lambda prompt: False, max_resample_times=2)
    assert len(rounds) == 3
    assert found(sampler) == rounds[0]


def test_a_useful_group_goes_before_those_of_equal_rewards():
    sampler, rounds = run(lambda prompt: prompt.index == rounds_last(), max_resample_times=1)
    assert found(sampler)[0] == rounds_last()
    assert len(found(sampler)) == BATCH_SIZE == len(rounds[0])


def rounds_last() -> int:
    """The last prompt that the second round tries when the first found nothing."""
    _, rounds = run(lambda prompt: False, max_resample_times=1)
    return rounds[1][-1]


def test_oversampling_tries_more_prompts_than_are_missing_and_keeps_the_first_it_finds():
    sampler, rounds = run(lambda prompt: prompt.index % 2 == 0, dynamic_sample_oversampling=2.4)
    found_at_once = [index for index in rounds[0] if index % 2 == 0]
    missing = BATCH_SIZE - len(found_at_once)
    assert len(rounds[1]) == math.ceil(2.4 * missing)
    useful = [index for indices in rounds for index in indices if index % 2 == 0]
    assert len(useful) > BATCH_SIZE
    assert found(sampler) == useful[:BATCH_SIZE]


def test_data_that_has_no_more_prompts_ends_the_search():
    _, rounds = run(lambda prompt: False, num_prompts=BATCH_SIZE + 3, max_resample_times=9)
    assert [len(indices) for indices in rounds] == [BATCH_SIZE, 3]


def test_the_same_generation_tries_the_same_prompts_again():
    assert run(lambda prompt: False)[1] == run(lambda prompt: False)[1]


def test_samples_that_could_not_be_scored_are_no_spread():
    nan = math.nan
    assert not ScoredGroup([], [], [nan, 0.5, 0.5]).has_reward_variance(None)
    assert not ScoredGroup([], [], [nan, nan]).has_reward_variance(None)
    assert ScoredGroup([], [], [nan, 0.5, 0.4]).has_reward_variance(None)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_sums_that_were_rounded_differently_are_no_spread(size):
    rounded = [(0.1 + 0.2) * size, 0.3 * size]
    assert rounded[0] != rounded[1]
    assert not ScoredGroup([], [], rounded).has_reward_variance(None)
    assert ScoredGroup([], [], [0.3 * size, 0.300001 * size]).has_reward_variance(None)


def test_a_length_penalty_is_no_spread_when_accuracy_is_compared():
    def group(*scores: tuple[float, float]) -> ScoredGroup:
        rewards = [{"exact": right, "soft_overlong": penalty} for right, penalty in scores]
        return ScoredGroup([], rewards, [sum(score) for score in scores])

    all_wrong = group((0, 0), (0, -0.5))
    assert all_wrong.has_reward_variance(None)
    assert not all_wrong.has_reward_variance("exact")
    assert group((0, 0), (1, -1)).has_reward_variance("exact")
    assert not group((0, 0), (1, math.nan)).has_reward_variance(
        "exact"
    )  # only one will be trained on


def test_the_search_compares_the_reward_that_the_config_names():
    def right(prompt: Prompt) -> list[dict[str, float]]:
        return [{"exact": 0.0}, {"exact": float(prompt.index % 2)}]

    sampler = DynamicSampler(
        stream(), 3, config(dynamic_sample_reward="exact", max_resample_times=1)
    )
    tried = sampler.prompts
    sampler.add_groups([ScoredGroup([p], right(p), [0.1, 0.9]) for p in tried])
    odd = [prompt.index for prompt in tried if prompt.index % 2]
    assert len(sampler.prompts) == BATCH_SIZE - len(odd) > 0
    assert found(sampler)[: len(odd)] == odd


def test_unfiltered_metrics_cover_the_groups_of_replaced_prompts():
    sampler = DynamicSampler(stream(), 3, config(max_resample_times=1))
    sampler.add_groups([ScoredGroup([p], [], [0.0, math.nan]) for p in sampler.prompts])
    sampler.add_groups([ScoredGroup([p], [], [0.0, 1.0]) for p in sampler.prompts])
    metrics = sampler.tally.metrics(sampler.num_replaced, sampler._cfg)
    assert metrics["unfiltered/reward"] == 1 / 3
    assert metrics["unfiltered/frac_reward_zero_std"] == 0.5


def test_failures_of_prompts_that_were_replaced_count_as_well():
    sampler = DynamicSampler(stream(), 0, config())
    groups = scored(sampler.prompts, lambda prompt: True)
    sampler.add_groups([ScoredGroup(groups[0].samples, [{}], [math.nan, math.nan]), *groups[1:]])
    assert len(sampler.prompts) == 1
    sampler.add_groups(scored(sampler.prompts, lambda prompt: True))
    assert sampler.tally.num_failed == 2
    assert len(sampler.groups()) == BATCH_SIZE


def test_failures_of_all_rounds_are_counted_beside_all_that_was_scored():
    """So that many rounds with few failures each are not taken for one with many."""
    sampler = DynamicSampler(stream(), 3, config(max_resample_times=2))
    for _ in range(3):
        prompts = sampler.prompts
        sampler.add_groups([ScoredGroup([p], [{}], [math.nan, 0.1]) for p in prompts])
    assert not sampler.prompts
    assert (sampler.tally.num_failed, len(sampler.tally.totals)) == (3 * BATCH_SIZE, 6 * BATCH_SIZE)
