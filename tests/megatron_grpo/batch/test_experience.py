"""How scored samples become advantages, masks and packed microbatches."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.oracle.policies import tiny_config
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.distribute import DataParallelShard, split_for_data_parallel
from megatron_grpo.batch.experience import Experience, compute_advantages, subtract_kl
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import RewardError, total_rewards
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel

LENGTHS = [3, 5, 2, 4]  # of completions: two prompts with two each


def config(*overrides: str) -> Config:
    return tiny_config(
        Path("model"),
        ParallelDims(),
        "grpo.num_generations=2",
        "grpo.generation_batch_size=4",
        "reward.functions=[exact]",
        *overrides,
    )


def samples(**changes) -> list[Sample]:
    """Four samples; each of `changes` has a field's value for each."""
    return [
        Sample(
            **{
                "prompt": Prompt(index=10 + i // 2, token_ids=(5, 6), text="", row={}),
                "sample_index": i % 2,
                "completion_ids": tuple(range(20, 20 + length)),
                "logprobs": (-1.0,) * length,
                "finish_reason": "stop",
                "text": "",
                "policy_version": 0,
                **{name: values[i] for name, values in changes.items()},
            }
        )
        for i, length in enumerate(LENGTHS)
    ]


def scores(*values: float) -> list[dict[str, float]]:
    return [{"exact": value} for value in values]


def experience_of(given: list[Sample], rewards: list[dict[str, float]], cfg: Config) -> Experience:
    totals = total_rewards(rewards, cfg.reward_terms, cfg.reward.clip_range)
    return compute_advantages(given, rewards, totals, AdvantageFunction.of(cfg))


def split(experience: Experience, cfg: Config) -> Iterator[list[DataParallelShard]]:
    return split_for_data_parallel(experience, 0, CostModel(), cfg, cfg.dims, Alignment())


def packed(experience, cfg):
    """For each sequence: which tokens count, their weights and their advantages."""
    [[share]] = split(experience, cfg)
    [batch] = share.pack(Alignment(), share_prompts=False)
    of = [batch.completion_mask & (batch.sequence_index == i) for i in range(len(LENGTHS))]
    return [
        (batch.loss_mask[mask].tolist(), batch.loss_weights[mask], batch.advantages[mask])
        for mask in of
    ]


def test_a_sample_without_a_score_has_no_token_in_the_loss():
    cfg = config("grpo.scale_rewards=none", "grpo.loss_type=grpo")
    experience = experience_of(samples(), scores(1, math.nan, 0, 1), cfg)
    found = packed(experience, cfg)
    assert [all(mask) for mask, _, _ in found] == [True, False, True, True]
    assert not any(found[1][0])
    assert experience.advantages.tolist() == [0, 0, -0.5, 0.5]
    # A masked sequence still counts in the mean over the batch's sequences.
    assert found[0][1].tolist() == pytest.approx([1 / (4 * 3)] * 3)


def test_rewards_are_clipped_before_they_are_compared():
    cfg = config("grpo.scale_rewards=none", "reward.clip_range=[-1, 2]")
    experience = experience_of(samples(), scores(9, 0, -5, 1), cfg)
    assert experience.totals.tolist() == [2, 0, -1, 1]
    assert experience.advantages.tolist() == [1, -1, -1, 1]


def test_packed_values_have_the_bits_of_torchs_tensors():
    logprobs = [tuple(-1 / (3 + i + k) for k in range(length)) for i, length in enumerate(LENGTHS)]
    masks = [tuple(k % 2 == 0 for k in range(length)) for length in LENGTHS]
    given, cfg = samples(logprobs=logprobs, loss_mask=masks), config()
    [[share]] = split(experience_of(given, scores(1, 0, 0, 1), cfg), cfg)
    [batch] = share.pack(Alignment(), share_prompts=False)
    for i, sample in enumerate(given):
        place = batch.sequence_index == i
        tokens = torch.tensor([*sample.prompt.token_ids, *sample.completion_ids])
        assert torch.equal(batch.tokens[place], tokens)
        place &= batch.completion_mask
        assert torch.equal(batch.rollout_logprobs[place], torch.tensor(logprobs[i]))
        assert torch.equal(batch.loss_mask[place], torch.tensor(masks[i]))


def test_the_overlong_filter_leaves_out_truncated_completions():
    reasons = ["stop", "length", "stop", "length"]
    for option, expected in (("true", [True, False, True, False]), ("false", [True] * 4)):
        cfg = config(f"grpo.overlong_filter={option}")
        found = packed(experience_of(samples(finish_reason=reasons), scores(1, 0, 0, 1), cfg), cfg)
        assert [all(mask) for mask, _, _ in found] == expected


def test_the_divergence_is_subtracted_before_rewards_are_compared():
    cfg = config("grpo.scale_rewards=none")
    experience = experience_of(samples(), scores(1, 0, 0, 1), cfg)
    kl = torch.tensor([2.0, 0, 0, 0], dtype=torch.float64)
    less = subtract_kl(experience, kl, 0.25, AdvantageFunction.of(cfg))
    assert less.advantages.tolist() == [0.25, -0.25, -0.5, 0.5]
    assert less.totals.tolist() == experience.totals.tolist()  # rewards stay


def test_a_users_advantages_get_the_columns_that_they_name(tmp_path):
    file = tmp_path / "mine.py"
    cfg = config(f"grpo.advantage_estimator={file}:mine", "grpo.beta=0.1", "grpo.kl_in_reward=true")
    function = "def mine(rewards, group_ids, kind, finish_reasons, **_):\n    return "
    weights = "[{'a': 1.0, 'b': 2.0}[k] * (r == 'stop') for k, r in zip(kind, finish_reasons)]"
    file.write_text(f"import torch\n{function}(rewards - 1) * torch.tensor({weights})\n")
    prompts = [
        Prompt(index=i // 2, token_ids=(5,), text="", row={"kind": "ab"[i // 2]}) for i in range(4)
    ]
    given = samples(prompt=prompts, finish_reason=["stop", "length", "stop", "stop"])
    experience = experience_of(given, scores(3, 3, math.nan, 2), cfg)
    assert experience.advantages.tolist() == [2, 0, 0, 2]
    kl = torch.ones(4, dtype=torch.float64)
    assert subtract_kl(experience, kl, 0.5, AdvantageFunction.of(cfg)).advantages.tolist() == [
        1.5,
        0,
        0,
        1,
    ]
    file.write_text(f"{function}rewards[:2]\n")
    with pytest.raises(RewardError, match=r"returns the shape \[2\] for 4 rewards, not \[4\]"):
        experience_of(given, scores(3, 3, 1, 2), cfg)


def test_under_process_supervision_a_token_has_the_steps_that_end_at_it_or_later():
    cfg = config(
        "environment.name=file.py:Class", "environment.weight=2", "grpo.supervision=process"
    )
    steps = [((1, 1.0), (2, 0.0)), ((4, 0.5),), ((1, 1.0),), ((0, 0.0), (3, 1.0))]
    rewards = [
        {"exact": exact, "environment": sum(r for _, r in of)}
        for exact, of in zip([1.0, 0.0, math.nan, 1.0], steps, strict=True)
    ]
    experience = experience_of(samples(step_rewards=steps), rewards, cfg)
    first = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # with the outcome rewards
    a, b, c, d, e = ((first - first.mean()) / (first.std() + 1e-4)).tolist()
    found = [advantages.tolist() for _, _, advantages in packed(experience, cfg)]
    assert found[0] == pytest.approx([a + b + c, a + b + c, b + c])
    assert found[1] == pytest.approx([d + e] * 5, abs=1e-6)
    assert found[2] == [0, 0]  # not scored
    assert experience.advantages.tolist() == pytest.approx(
        [a + b + c, d + e, 0, found[3][0]], abs=1e-6
    )


def test_the_scores_of_a_process_reward_model_take_the_place_of_its_reward():
    model = "{name: reward_model, weight: 2.0, arguments: {base_url: http://h, step_tag: x}}"
    cfg = config(f"reward.functions=[{model}, exact]", "grpo.supervision=process")
    steps = [((1, 1.0), (2, 0.0)), ((4, 0.5),), ((1, 1.0),), ((0, 0.0), (3, 1.0))]
    lowest = [min(r for _, r in of) for of in steps]
    rewards = [
        {"exact": exact, "reward_model": low}
        for exact, low in zip([1.0, 0.0, math.nan, 1.0], lowest, strict=True)
    ]
    experience = experience_of(samples(step_rewards=steps), rewards, cfg)
    assert experience.totals.tolist()[:2] == [1.0, 1.0]  # twice the lowest step, plus exact
    first = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # with the outcome rewards
    a, b, c, d, e = ((first - first.mean()) / (first.std() + 1e-4)).tolist()
    found = [advantages.tolist() for _, _, advantages in packed(experience, cfg)]
    assert found[0] == pytest.approx([a + b + c, a + b + c, b + c])
    assert found[1] == pytest.approx([d + e] * 5, abs=1e-6)
    assert found[2] == [0, 0]


def test_normalized_rewards_are_summed_by_weight():
    cfg = config(
        "reward.functions=[{name: exact, weight: 1.0}, {name: math_answer, weight: 3.0}]",
        "grpo.multi_objective_aggregation=normalize_then_sum",
    )
    rewards = [
        {"exact": exact, "math_answer": answer}
        for exact, answer in zip([100.0, 0, 0, 100], [0.0, 1, 1, 1], strict=True)
    ]
    advantages = experience_of(samples(), rewards, cfg).advantages
    # In the first prompt the larger weight decides, not the larger reward.
    assert advantages[0] < 0 < advantages[1]
    assert advantages.mean() == pytest.approx(0, abs=1e-12)


def test_packed_tokens_have_the_experts_that_the_engine_chose():
    routes = [np.full((1 + length, 2, 3), length, np.uint8) for length in LENGTHS]
    routes[2] = None  # failed before the first request
    experience = experience_of(samples(routes=routes), scores(1, 0, 0, 1), config())
    [[share]] = split(experience, config())
    [batch] = share.pack(Alignment(), share_prompts=False)
    for i, length in enumerate(LENGTHS):
        of_sequence = batch.routed_experts[batch.sequence_index == i]
        chosen = torch.full((1 + length, 2, 3), length) if i != 2 else torch.zeros(0, 2, 3)
        assert torch.equal(of_sequence[: len(chosen)].long(), chosen.long())
        assert all(len(row.unique()) == 3 for row in of_sequence[len(chosen) :].flatten(0, 1))
