import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.loss import grpo_loss, loss_weights
from megatron_grpo.metrics import TrainMetrics, completion_metrics, reward_metrics
from parallel.packing import Alignment, TokenSequence, pack

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


def count(members, *, beta=0.1):
    """Metrics of one microbatch with these sequences, and the total of its loss."""
    weights = loss_weights(torch.tensor([len(tokens) for tokens in TOKENS]), "grpo", 8)
    sequences = [
        TokenSequence(
            tokens=torch.zeros(1 + len(tokens), dtype=torch.int64),
            num_prompt_tokens=1,
            advantage=ADVANTAGES[i],
            loss_weight=float(weights[i]),
            rollout_logprobs=torch.tensor([token[3] for token in tokens]),
        )
        for i, tokens in enumerate(TOKENS)
    ]
    batch = pack(sequences, members, Alignment(sequence=4, total=4), dtype=torch.float64)

    def per_token(column):
        values = torch.zeros(len(batch.tokens), dtype=torch.float64)
        chosen = [token[column] for i in members for token in TOKENS[i]]
        return values.masked_scatter(batch.loss_mask, torch.tensor(chosen, dtype=torch.float64))

    logprobs, entropy = per_token(0), per_token(4)
    batch = replace(batch, old_logprobs=per_token(1), ref_logprobs=per_token(2) if beta else None)
    loss = grpo_loss(
        logprobs,
        batch.old_logprobs,
        batch.ref_logprobs,
        batch.advantages,
        batch.loss_weights,
        batch.loss_mask,
        epsilon=0.2,
        epsilon_high=0.2,
        delta=None,
        beta=beta,
    )
    metrics = TrainMetrics(len(TOKENS))
    metrics.add(batch, batch.loss_mask, loss, logprobs, entropy)
    return metrics, loss.total.item()


@pytest.mark.parametrize("split", SPLITS)
def test_metrics_do_not_depend_on_the_split_over_ranks(split):
    parts = [count(members) for members in split]

    def all_reduce(tensor, op):
        name = {dist.ReduceOp.SUM: "sums", dist.ReduceOp.MAX: "maxima"}[op]
        stacked = torch.stack([getattr(metrics, name) for metrics, _ in parts])
        tensor.copy_(stacked.sum(0) if name == "sums" else stacked.amax(0))

    result = parts[0][0].reduce(all_reduce, with_kl=True)

    every = [token for tokens in TOKENS for token in tokens]

    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    def k3(log_p, log_q):
        return math.exp(log_q - log_p) - (log_q - log_p) - 1

    expected = {
        "loss": sum(total for _, total in parts),
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
        "entropy/mean": mean([0.6, 2.0, 0.4]),
        "entropy/min": 0.4,
        "entropy/max": 2.0,
        "rollout/logprob_gap_mean": (0.05 + 0.01) / 7,
        "rollout/logprob_gap_max": 0.05,
        "rollout/kl": mean(k3(rollout, old) for _, old, _, rollout, _ in every),
    }
    assert result == pytest.approx(expected, rel=1e-6)
    assert set(result) == set(expected)


def test_without_a_reference_there_is_no_kl():
    metrics, _ = count([0, 1], beta=0.0)
    assert "kl" not in metrics.reduce(no_peers, with_kl=False)


def test_the_gap_is_to_the_policy_itself_while_no_old_logprobs_are_kept():
    weights = torch.ones(2)
    mask = torch.tensor([False, True])
    batch = pack(
        [
            TokenSequence(
                tokens=torch.zeros(2, dtype=torch.int64),
                num_prompt_tokens=1,
                advantage=1.0,
                loss_weight=1.0,
                rollout_logprobs=torch.tensor([-1.5]),
            )
        ],
        [0],
        Alignment(),
    )
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    loss = grpo_loss(
        logprobs,
        None,
        None,
        weights,
        weights,
        mask,
        epsilon=0.2,
        epsilon_high=0.2,
        delta=None,
        beta=0.0,
    )
    metrics = TrainMetrics(1)
    metrics.add(batch, mask, loss, logprobs, torch.zeros(2))
    result = metrics.reduce(no_peers, with_kl=False)
    assert result["rollout/logprob_gap_mean"] == pytest.approx(0.5)
    assert result["approx_kl"] == 0


def test_a_batch_without_a_single_token_reports_zeros():
    metrics, _ = count([3])
    assert set(metrics.reduce(no_peers, with_kl=True).values()) == {0.0}


def test_completion_metrics():
    assert completion_metrics([3, 8, 4, 5], [False, True, False, False]) == {
        "completions/mean_length": 5.0,
        "completions/min_length": 3.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.25,
    }


def test_reward_metrics():
    rewards = [{"exact": e, "format": f} for e, f in [(1, 0.5), (0, 0.5), (1, 0.0), (1, 0.0)]]
    totals = torch.tensor([1.5, 0.5, 1.0, 1.0])
    advantages = torch.tensor([0.7, -0.7, 0.0, 0.0])
    metrics = reward_metrics(rewards, totals, torch.tensor([0, 0, 1, 1]), advantages)
    assert metrics == pytest.approx(
        {
            "reward": 1.0,
            "reward_std": (0.5**0.5 + 0) / 2,
            "frac_reward_zero_std": 0.5,
            "advantages/std": (0.98 / 3) ** 0.5,
            "reward/exact/mean": 0.75,
            "reward/exact/std": 0.5,
            "reward/format/mean": 0.25,
            "reward/format/std": (0.25 / 3) ** 0.5,
        },
        rel=1e-6,
    )
