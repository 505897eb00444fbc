import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from helpers.oracle.losses import chosen_tokens
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss import LossTokens, grpo_loss, loss_weights
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.experience import completion_metrics
from megatron_grpo.batch.token_log import VALUES, first_rows
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.reporting.metrics import TrainMetrics, peak_memory, reward_metrics
from parallel.alignment import Alignment
from parallel.packing import TokenSequence, pack

# Four sequences of one prompt token: [new, old, ref, rollout, entropy] of each response token.
TOKENS = [
    [(-1.0, -1.3, -1.1, -1.25, 0.5), (-0.7, -0.7, -0.9, -0.7, 0.7)],
    [(-2.0, -1.5, -1.9, -1.5, 1.5), (-0.5, -1.0, -0.6, -1.0, 2.5)],
    [(-0.2, -0.3, -0.2, -0.31, 0.1), (-0.9, -0.4, -0.4, -0.4, 0.2), (-1.0, -2.0, -1.0, -2.0, 0.9)],
    [],
]
ADVANTAGES = [1.0, -2.0, 0.5, 3.0]
SPLITS = [[[0, 1, 2, 3]], [[2, 0], [3, 1]], [[0], [], [3], [1], [2]]]


def no_peers(tensor, op):
    pass


def grpo_config(**options):
    return GRPOConfig(**({"generation_batch_size": 8, "beta": 0.1} | options))


def count(members, cfg, tokens=TOKENS, old_is_rollout=False, num_logged_tokens=0):
    """Metrics of one microbatch with these sequences, and its total loss."""
    weights = loss_weights(torch.tensor([len(own) for own in tokens]), "sequence", 8)
    log_rows = first_rows([len(own) for own in tokens], num_logged_tokens)
    sequences = [
        TokenSequence(
            tokens=torch.zeros(1 + len(own), dtype=torch.int64),
            num_prompt_tokens=1,
            advantage=ADVANTAGES[i],
            loss_weight=float(weights[i]),
            rollout_logprobs=torch.tensor([token[3] for token in own]),
            log_row=log_rows[i],
        )
        for i, own in enumerate(tokens)
    ]
    batch = pack(sequences, members, Alignment(sequence=4, total=4), dtype=torch.float64)

    def per_token(column):
        values = torch.zeros(len(batch.tokens), dtype=torch.float64)
        chosen = [token[column] for i in members for token in tokens[i]]
        return values.masked_scatter(batch.loss_mask, torch.tensor(chosen, dtype=torch.float64))

    logprobs, entropy = per_token(0), per_token(4)
    batch = replace(
        batch,
        old_logprobs=per_token(3 if old_is_rollout else 1),
        ref_logprobs=per_token(2) if cfg.beta else None,
        # The policy has moved on since: entropies have doubled.
        high_entropy=(entropy / 2).where(entropy >= 0.7, -math.inf)
        if cfg.top_entropy_quantile < 1
        else None,
    )
    tokens_of_batch = LossTokens.select(batch, chosen_tokens(batch.loss_mask, logprobs, entropy))
    function = LossFunction.of(cfg)
    loss = grpo_loss(tokens_of_batch, cfg, function, cfg.beta)
    metrics = TrainMetrics(
        len(tokens),
        values=function.values,
        old_is_rollout=old_is_rollout,
        num_logged_tokens=num_logged_tokens,
    )
    metrics.add(tokens_of_batch, loss)
    return metrics, loss.total.item()


def metrics_of(members, cfg, *args, **options):
    """The metrics of a single rank with these sequences."""
    return count(members, cfg, *args, **options)[0].reduce(no_peers, cfg).metrics


def reduced(parts, cfg):
    """The report of the ranks with these parts."""

    def all_reduce(tensor, op):
        if op == dist.ReduceOp.MAX:
            tensor.copy_(torch.stack([metrics.maxima for metrics in parts]).amax(0))
        elif tensor is parts[0].sums:
            tensor.copy_(torch.stack([metrics.sums for metrics in parts]).sum(0))
        else:
            tensor.copy_(torch.stack([metrics.token_log.values for metrics in parts]).sum(0))

    return parts[0].reduce(all_reduce, cfg)


@pytest.mark.parametrize("split", SPLITS)
def test_reduce_does_not_depend_on_the_split_over_ranks(split):
    cfg = grpo_config(
        top_entropy_quantile=0.5,
        rollout_importance_sampling_mode="token_truncate",
        off_policy_mask_threshold=0.1,
    )
    parts = [count(members, cfg) for members in split]
    report = reduced([metrics for metrics, _ in parts], cfg)
    every = [token for tokens in TOKENS for token in tokens]

    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    def k3(log_p, log_q):
        return math.exp(log_q - log_p) - (log_q - log_p) - 1

    weights = [math.exp(old - rollout) for _, old, _, rollout, _ in every]
    penalty = sum(mean(k3(new, ref) for new, _, ref, _, _ in tokens) for tokens in TOKENS[:3]) / 4
    expected = {
        "loss": sum(total for _, total in parts),
        "policy_loss": sum(total for _, total in parts) - 0.1 * penalty,
        "num_response_tokens": 7,
        "kl": mean(k3(new, ref) for new, _, ref, _, _ in every),
        "approx_kl": mean(k3(old, new) for new, old, _, _, _ in every),
        "ratio/mean": mean(math.exp(new - old) for new, old, _, _, _ in every),
        "ratio/max": math.exp(1.0),
        # Clipped: e^0.3, not 1 with A = 1; e^-0.5, not e^0.5 with A = -2; of e^0.1, e^-0.5, e^1
        # with A = 0.5 the last.
        "clip_ratio/region_mean": 3 / 7,
        "clip_ratio/low_mean": 1 / 7,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 2 / 7,
        "clip_ratio/high_max": 1 / 2,
        "entropy": mean(entropy for *_, entropy in every),
        "entropy/min": 0.4,
        "entropy/max": 2.0,
        "rollout/logprob_gap_mean": (0.05 + 0.01) / 7,
        "rollout/logprob_gap_max": 0.05,
        "rollout/kl": mean(k3(rollout, old) for _, old, _, rollout, _ in every),
        "rollout/ratio_mean": mean(math.exp(old - rollout) for _, old, _, rollout, _ in every),
        "rollout/weight_mean": mean(weights),
        "rollout/weight_min": math.exp(-0.05),
        "rollout/weight_max": math.exp(0.01),
        "rollout/eff_sample_size": sum(weights) ** 2 / (7 * sum(w * w for w in weights)),
        "rollout/masked_fraction": 0.0,
        "rollout/seq_masked_fraction": 0.0,
        "rollout/stale_gap_mean": mean(abs(new - old) for new, old, _, _, _ in every),
        "entropy/high_ratio": 4 / 7,  # 0.7, 1.5, 2.5 and 0.9
        "entropy/threshold": 0.35,
        # Only the second has a negative advantage: the engine is ahead by 0.5 and by -0.5.
        "off_policy_mask_ratio": 0.0,
    }
    assert report.metrics == pytest.approx(expected, rel=1e-6)
    assert set(report.metrics) == set(expected)
    assert report.entropy == pytest.approx([0.6, 2.0, 0.4, math.nan], nan_ok=True)
    assert report.rollout_gap == pytest.approx([0.025, 0.0, 0.01 / 3, math.nan], nan_ok=True)


def test_reduce_leaves_out_what_the_config_has_no_use_for():
    assert not metrics_of([0, 1], grpo_config(beta=0.0)).keys() & {
        "kl",
        "policy_loss",
        "entropy/high_ratio",
        "entropy/threshold",
        "rollout/weight_mean",
        "rollout/eff_sample_size",
        "off_policy_mask_ratio",
    }
    for loss_type in ("sapo", "vespo"):  # they clip nothing
        metrics = metrics_of([0, 1], grpo_config(loss_type=loss_type))
        assert "ratio/mean" in metrics
        assert not [name for name in metrics if name.startswith("clip_ratio")]


def test_off_policy_mask_ratio_counts_tokens_that_the_policy_left():
    # The second sequence has advantage -2; now it is behind the engine by 0.25 per token.
    moved = [TOKENS[0], [(-2.5, *TOKENS[1][0][1:]), TOKENS[1][1]], *TOKENS[2:]]
    metrics = metrics_of([0, 1], grpo_config(off_policy_mask_threshold=0.1), moved)
    assert metrics["off_policy_mask_ratio"] == 0.5


@pytest.mark.parametrize(
    ("mode", "weights", "num_masked"),
    [
        # Only the first token of the third sequence is above the bound of e^0.005.
        ("token_mask", [math.exp(-0.05), 1, 1, 1, 0, 1, 1], 1),
        ("sequence_mask", [math.exp(-0.05)] * 2 + [1, 1, 0, 0, 0], 3),
    ],
)
def test_masked_fractions_are_of_tokens_and_of_sequences(mode, weights, num_masked):
    cfg = grpo_config(
        rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=1.005
    )
    metrics = reduced([count(members, cfg)[0] for members in SPLITS[1]], cfg).metrics
    assert metrics["rollout/weight_mean"] == pytest.approx(sum(weights) / 7)
    assert metrics["rollout/weight_min"] == 0
    assert metrics["rollout/weight_max"] == pytest.approx(1)
    share = sum(weights) ** 2 / (7 * sum(w * w for w in weights))
    assert metrics["rollout/eff_sample_size"] == pytest.approx(share)
    assert metrics["rollout/masked_fraction"] == pytest.approx(num_masked / 7)
    assert metrics["rollout/seq_masked_fraction"] == pytest.approx(1 / 3)  # of those with tokens

    cfg = grpo_config(
        rollout_importance_sampling_mode="token_mask", rollout_importance_sampling_min=0.5
    )
    metrics = metrics_of([0], cfg, [[(-2.0, -2.0, -2.0, -1.0, 0.5)]])  # all are far behind
    assert (metrics["rollout/masked_fraction"], metrics["rollout/eff_sample_size"]) == (1, 0)


def test_logprob_gap_without_old_logprobs_is_to_the_policy():
    cfg = grpo_config(beta=0.0)
    metrics = metrics_of([0], cfg, old_is_rollout=True)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(0.25 / 2)
    assert metrics["ratio/max"] == pytest.approx(math.exp(0.25))
    assert metrics["rollout/stale_gap_mean"] == 0
    sequence = TokenSequence(
        tokens=torch.zeros(2, dtype=torch.int64),
        num_prompt_tokens=1,
        advantage=1.0,
        loss_weight=1.0,
        rollout_logprobs=torch.tensor([-1.5]),
    )
    batch = pack([sequence], [0], Alignment())  # its old log-probabilities are not kept
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    tokens = LossTokens.select(batch, chosen_tokens(batch.loss_mask, logprobs, torch.zeros(2)))
    metrics = TrainMetrics(1)
    metrics.add(tokens, grpo_loss(tokens, cfg, LossFunction.of(cfg), 0.0))
    result = metrics.reduce(no_peers, cfg).metrics
    assert result["rollout/logprob_gap_mean"] == pytest.approx(0.5)
    assert result["approx_kl"] == 0


def test_reduce_of_no_token_is_zeros():
    report = count([3], grpo_config())[0].reduce(no_peers, grpo_config())
    assert set(report.metrics.values()) == {0.0}
    assert all(map(math.isnan, report.entropy + report.rollout_gap))


def test_completion_metrics_have_terminated_lengths_or_0():
    assert completion_metrics([3, 8, 4, 5], [False, True, False, False]) == {
        "completions/mean_length": 5.0,
        "completions/min_length": 3.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 4.0,
        "completions/min_terminated_length": 3.0,
        "completions/max_terminated_length": 5.0,
    }
    metrics = completion_metrics([8, 8], [True, True])
    assert {value for name, value in metrics.items() if "terminated" in name} == {0}


def test_reward_metrics_are_of_completions_and_groups():
    rewards = [{"exact": e, "format": f} for e, f in [(1, 0.5), (0, 0.5), (1, 0.0), (1, 0.0)]]
    totals = torch.tensor([1.5, 0.5, 1.0, 1.0])
    advantages = torch.tensor([0.7, -0.7, 0.0, 0.0])
    metrics = reward_metrics(rewards, totals, torch.tensor([0, 0, 1, 1]), advantages, [*rewards[0]])
    assert metrics == pytest.approx(
        {
            "reward": 1.0,
            "reward/min": 0.5,
            "reward/max": 1.5,
            "reward_std": (0.5 / 3) ** 0.5,
            "reward_group_std": (0.5**0.5 + 0) / 2,
            "frac_reward_zero_std": 0.5,
            "advantages/std": (0.98 / 3) ** 0.5,
            "advantages/min": -0.7,
            "advantages/max": 0.7,
            "reward/exact/mean": 0.75,
            "reward/exact/std": 0.5,
            "reward/format/mean": 0.25,
            "reward/format/std": (0.25 / 3) ** 0.5,
        },
        rel=1e-6,
    )


def test_reward_metrics_are_in_the_order_of_the_config():
    for rewards in ([{"a": 1.0}, {"b": 2.0}], [{"b": 2.0}, {"a": 1.0}]):
        metrics = reward_metrics(
            rewards, torch.ones(2), torch.tensor([0, 1]), torch.zeros(2), ["b", "a", "unused"]
        )
        means = [name for name in metrics if name.endswith("/mean")]
        assert means == ["reward/b/mean", "reward/a/mean"]


def test_reward_metrics_leave_out_scores_that_are_nan():
    nan = math.nan
    metrics = reward_metrics(
        [{"exact": 1.0, "judge": nan}, {"exact": 0.0, "judge": nan}, {"exact": 1.0, "judge": 0.5}],
        torch.tensor([nan, 0.0, 1.5]),
        torch.tensor([0, 0, 0]),
        torch.zeros(3),
        ["exact", "judge"],
    )
    assert metrics == pytest.approx(
        {
            "reward": 0.75,
            "reward/min": 0.0,
            "reward/max": 1.5,
            "reward_std": 1.5 * 0.5**0.5,
            "reward_group_std": 1.5 * 0.5**0.5,
            "frac_reward_zero_std": 0.0,
            "advantages/std": 0.0,
            "advantages/min": 0.0,
            "advantages/max": 0.0,
            "reward/exact/mean": 2 / 3,
            "reward/exact/std": 3**-0.5,
            "reward/judge/mean": 0.5,
            "reward/judge/std": 0.0,
        }
    )


@pytest.mark.parametrize("split", SPLITS)
def test_reduce_logs_the_values_of_tokens_of_all_ranks(split):
    cfg = grpo_config(top_entropy_quantile=0.5, rollout_importance_sampling_mode="token_truncate")
    parts = [count(members, cfg, num_logged_tokens=5)[0] for members in split]
    logged = reduced(parts, cfg).tokens
    columns = dict(zip(VALUES, logged.T, strict=True))
    # The first five tokens: both of the first two sequences, and one of the third.
    of_log = [token for tokens in TOKENS for token in tokens][:5]
    new, old, _, rollout, entropy = (torch.tensor(of) for of in zip(*of_log, strict=True))
    torch.testing.assert_close(columns["logprob"], new)
    torch.testing.assert_close(columns["gap"], old - rollout)
    torch.testing.assert_close(columns["ratio"], (new - old).exp())
    torch.testing.assert_close(columns["entropy"], entropy)
    # e^0.3 is above the clip with A = 1, e^-0.5 below it with A = -2; 1/8 and 1/12 weigh a token.
    assert columns["clipped"].tolist() == [1, 0, -1, 0, 0]
    weights = torch.tensor([1 / 8] * 4 + [1 / 12]) * (old - rollout).exp().clamp(max=2.0)
    torch.testing.assert_close(columns["loss_weight"], weights * (entropy >= 0.7))


def peak_on_rank(rank):
    """The metrics for faked GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: (rank + 1) * 10**9)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda _: (4 - rank) * 10**9)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        return peak_memory(torch.device("cuda", rank))


def test_peak_memory_is_of_the_fullest_gpu():
    expected = {"perf/max_memory_allocated_gb": 2.0, "perf/max_memory_reserved_gb": 4.0}
    assert run_ranks(2, peak_on_rank) == [expected, expected]
