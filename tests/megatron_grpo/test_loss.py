import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_grpo.loss import grpo_loss, k3, loss_weights
from models import tiny_model
from oracle import OracleLoss, oracle_advantages, oracle_loss, oracle_model_loss
from parallel import ParallelDims
from parallel.microbatches import plan_microbatches
from parallel.packing import Alignment, TokenSequence, pack
from parallel.vocab import chosen_logprobs, local_mask, prediction_targets

CLIP = {"epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.0}


def token_losses(log_ratio, advantage, **overrides):
    """Loss of tokens with these log ratios and weight 1, and its gradient to their logprobs."""
    old = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    ones = torch.ones_like(old)
    loss = grpo_loss(logprobs, old, None, advantage * ones, ones, ones.bool(), **(CLIP | overrides))
    (grad,) = torch.autograd.grad(loss.total, logprobs)
    return loss, grad.tolist()


def test_the_worked_example_of_ratios_clips_and_their_mean():
    loss, grad = token_losses([0.25, -0.30], -1.432)
    assert [f"{r:.3f}" for r in loss.log_ratio.exp().tolist()] == ["1.284", "0.741"]
    objective = -loss.per_token
    # The published -1.838 is the product of the rounded ratio and advantage, 1.284 * -1.432 =
    # -1.8387, cut short.
    assert objective[0] == pytest.approx(-1.838, abs=1e-3)
    assert f"{objective[1]:.3f}" == "-1.146"
    assert f"{1.2 * -1.432:.3f}" == "-1.718"
    assert f"{math.exp(-0.30) * -1.432:.3f}" == "-1.061"
    assert f"{objective.mean():.3f}" == "-1.492"
    assert loss.clipped_low.tolist() == [False, True]
    assert grad[0] == pytest.approx(1.432 * math.exp(0.25))
    assert grad[1] == 0


def test_the_worked_example_of_k3():
    value = k3(torch.tensor(-0.476, dtype=torch.float64), torch.tensor(-0.600, dtype=torch.float64))
    assert f"{value:.4f}" == "0.0074"


def test_k3_of_equal_policies_is_exactly_zero_and_otherwise_positive():
    p = torch.tensor([-1.0, -2.0])
    assert k3(p, p).tolist() == [0, 0]
    assert (k3(p, p + torch.tensor([1e-3, -1e-3])) > 0).all()


ACTIONS = [[0, 2, 1], [1, 0], [2, 2], [0, 1]]
OLD = [[-0.50, -0.61, -0.92], [-1.20, -0.41], [-0.81, -0.69], [-0.51, -1.10]]
REF = [[-0.60, -0.71, -0.82], [-1.10, -0.51], [-0.91, -0.79], [-0.41, -1.00]]
LOGITS = [
    [[1.10, -0.20, 0.30], [-0.40, 0.80, 1.60], [0.10, 1.40, 0.20]],
    [[-0.20, 1.10, 0.40], [0.90, -0.30, 0.10]],
    [[0.10, 0.20, 1.30], [-0.10, 0.40, 1.50]],
    [[1.20, -0.40, 0.10], [-0.30, 1.50, 0.20]],
]


def test_the_full_toy_of_four_responses():
    advantages = oracle_advantages([[0.9, 0.3, -0.1, 0.7]], correction=0, epsilon=0.0)
    # Once by hand, with nothing but the formulas.
    means = []
    for actions, olds, refs, rows, advantage in zip(
        ACTIONS, OLD, REF, LOGITS, advantages, strict=True
    ):
        terms = []
        for action, old, ref, row in zip(actions, olds, refs, rows, strict=True):
            new = row[action] - math.log(sum(map(math.exp, row)))
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 0.8), 1.2)
            kl = math.exp(ref - new) - (ref - new) - 1
            terms.append(min(ratio * advantage, clipped * advantage) - 0.04 * kl)
        means.append(sum(terms) / len(terms))
    by_hand = -sum(means) / len(means)

    def flat(values):
        return torch.tensor([v for row in values for v in row], dtype=torch.float64)

    lengths = torch.tensor([len(actions) for actions in ACTIONS])
    rows = torch.tensor([row for rows in LOGITS for row in rows], dtype=torch.float64)
    actions = torch.tensor([a for row in ACTIONS for a in row])
    loss = grpo_loss(
        torch.log_softmax(rows, dim=1)[torch.arange(len(rows)), actions],
        flat(OLD),
        flat(REF),
        torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        loss_weights(lengths, "grpo", 3).repeat_interleave(lengths),
        torch.ones(len(rows), dtype=torch.bool),
        **(CLIP | {"beta": 0.04}),
    )
    assert loss.total.item() == pytest.approx(by_hand, rel=1e-12)


def test_loss_weights_of_every_loss_type():
    lengths = torch.tensor([1, 3, 4])
    assert loss_weights(lengths, "grpo", 10).tolist() == pytest.approx([1 / 3, 1 / 9, 1 / 12])
    assert loss_weights(lengths, "dapo", 10).tolist() == pytest.approx([1 / 8] * 3)
    assert loss_weights(lengths, "dr_grpo", 10).tolist() == pytest.approx([1 / 30] * 3)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_weights_are_finite_when_nothing_counts(loss_type):
    assert loss_weights(torch.zeros(2), loss_type, 10).isfinite().all()
    assert loss_weights(torch.zeros(0), loss_type, 10).tolist() == []


def test_with_the_generating_policy_itself_the_ratio_is_one_and_the_gradient_the_advantage():
    logprobs = torch.tensor([-1.0, -2.5], requires_grad=True)
    ones = torch.ones(2)
    advantages = torch.tensor([0.7, -1.3])
    loss = grpo_loss(logprobs, None, None, advantages, ones, ones.bool(), **CLIP)
    loss.total.backward()
    assert loss.log_ratio.tolist() == [0.0, 0.0]
    assert loss.total.item() == pytest.approx(0.6)
    assert torch.equal(logprobs.grad, -advantages)


@pytest.mark.parametrize(
    "advantage, ratio, moves",
    [
        (1.0, 1.25, True),
        (1.0, 1.35, False),
        (1.0, 0.5, True),
        (-1.0, 0.85, True),
        (-1.0, 0.7, False),
    ],
)
def test_clip_higher_widens_the_upper_side_only(advantage, ratio, moves):
    _, grad = token_losses([math.log(ratio)], advantage, epsilon=0.2, epsilon_high=0.3)
    assert (grad[0] != 0) == moves


def test_dual_clip_bounds_the_ratio_of_negative_advantages():
    loss, grad = token_losses([math.log(5.0), math.log(2.0)], -1.0, delta=3.0)
    assert loss.per_token.tolist() == pytest.approx([3.0, 2.0])
    assert grad[0] == 0
    assert grad[1] == pytest.approx(2.0)
    assert token_losses([math.log(5.0)], 1.0, delta=3.0)[0].total.item() == pytest.approx(-1.2)


def test_what_stands_off_the_mask_has_no_influence():
    nan, inf = float("nan"), float("inf")
    mask = torch.tensor([True, False, False])
    logprobs = torch.tensor([-1.0, nan, -inf], requires_grad=True)
    other = torch.tensor([-1.1, nan, inf])
    loss = grpo_loss(
        logprobs,
        other,
        other,
        torch.tensor([1.0, nan, 1.0]),
        torch.tensor([0.5, nan, 1.0]),
        mask,
        **(CLIP | {"beta": 0.1}),
    )
    loss.total.backward()
    assert loss.total.isfinite()
    assert loss.kl.tolist()[1:] == [0, 0]
    assert logprobs.grad[0] != 0
    assert logprobs.grad.tolist()[1:] == [0, 0]


def test_all_masked_is_a_zero_loss_with_a_zero_gradient():
    logprobs = torch.zeros(3, requires_grad=True)
    zeros = torch.zeros(3)
    loss = grpo_loss(logprobs, zeros, zeros, zeros, zeros, zeros.bool(), **(CLIP | {"beta": 0.1}))
    loss.total.backward()
    assert loss.total.item() == 0
    assert logprobs.grad.tolist() == [0, 0, 0]


def test_a_reference_without_beta_is_a_bug():
    zeros = torch.zeros(1)
    with pytest.raises(AssertionError, match="reference"):
        grpo_loss(zeros, zeros, zeros, zeros, zeros, zeros.bool(), **CLIP)


class BigramModel:
    """The least language model there is: the last token chooses the logits from a table."""

    vocab_size = 11

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(11, 11, generator=generator, dtype=torch.float64)
        self.table = table.requires_grad_()

    def response_logprobs(self, tokens, num_prompt_tokens, temperature):
        everything = torch.log_softmax(self.table / temperature, dim=1)
        return torch.stack(
            [everything[tokens[t - 1], tokens[t]] for t in range(num_prompt_tokens, len(tokens))]
            or [everything.sum() * 0]
        )[: len(tokens) - num_prompt_tokens]

    def packed_logprobs(self, batch, temperature):
        targets = prediction_targets(batch.cu_seqlens, torch.arange(len(batch.tokens)))
        return chosen_logprobs(
            self.table[batch.tokens],
            batch.tokens,
            targets,
            local_mask(targets, len(batch.tokens)) & batch.loss_mask,
            temperature=temperature,
            vocab_size=self.vocab_size,
            tensor_group=None,
            chunk_size=3,
        )[0]


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(data=3), ParallelDims(context=2, tensor=2, data=2)]
)
@pytest.mark.parametrize("max_tokens", [16, 40, 1000])
def test_loss_and_gradient_of_any_packing_equal_the_padded_oracle(
    off_policy, loss_type, dims, max_tokens
):
    cfg = OracleLoss(
        loss_type=loss_type,
        max_completion_length=9,
        epsilon=0.1,
        epsilon_high=0.15,
        delta=1.5,
        beta=0.3,
        temperature=0.7,
    )
    policy, old, reference = BigramModel(1), BigramModel(2 if off_policy else 1), BigramModel(3)
    generator = torch.Generator().manual_seed(0)
    completion_lengths = [5, 1, 9, 0, 3, 7, 2]  # one empty
    prompt_lengths = [2, 6, 1, 4, 3, 5, 1]
    advantages = [0.3, -1.2, 0.9, 2.0, -0.4, 0.0, -2.1]
    tokens = [
        torch.randint(11, (p + c,), generator=generator)
        for p, c in zip(prompt_lengths, completion_lengths, strict=True)
    ]

    def by_sequence(model):
        pairs = zip(tokens, prompt_lengths, strict=True)
        return [model.response_logprobs(t, p, cfg.temperature) for t, p in pairs]

    expected = oracle_loss(
        by_sequence(policy),
        advantages,
        cfg,
        [logprobs.detach() for logprobs in by_sequence(old)] if off_policy else None,
        [logprobs.detach() for logprobs in by_sequence(reference)],
    )
    (expected_grad,) = torch.autograd.grad(expected, policy.table)

    weights = loss_weights(torch.tensor(completion_lengths), loss_type, cfg.max_completion_length)
    sequences = [
        TokenSequence(
            tokens=tokens[i],
            num_prompt_tokens=prompt_lengths[i],
            advantage=advantages[i],
            loss_weight=float(weights[i]),
            rollout_logprobs=torch.zeros(completion_lengths[i]),
        )
        for i in range(len(tokens))
    ]
    alignment = Alignment.of(dims, sequence_parallel=True)
    plan = plan_microbatches([len(t) for t in tokens], max_tokens, dims, alignment)
    total = 0.0
    for members in (members for rank in plan for members in rank):
        batch = pack(sequences, members, alignment, dtype=torch.float64)
        with torch.no_grad():
            batch = replace(
                batch,
                old_logprobs=old.packed_logprobs(batch, cfg.temperature) if off_policy else None,
                ref_logprobs=reference.packed_logprobs(batch, cfg.temperature),
            )
        loss = grpo_loss(
            policy.packed_logprobs(batch, cfg.temperature),
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            batch.loss_weights,
            batch.loss_mask,
            epsilon=cfg.epsilon,
            epsilon_high=cfg.epsilon_high,
            delta=cfg.delta,
            beta=cfg.beta,
        )
        loss.total.backward()
        total += loss.total.item()
    assert total == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(policy.table.grad, expected_grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_real_model_on_packed_sequences_has_the_loss_and_gradients_of_the_padded_oracle(
    tmp_path, loss_type
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path, "qwen3", tied=True)).double()
    cfg = OracleLoss(loss_type=loss_type, max_completion_length=6, temperature=0.8)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]]
    completions = [[13, 14], [15, 16, 17, 18, 19, 1], [20]]
    advantages = [1.0, -0.5, 0.25]
    expected, expected_grads = oracle_model_loss(model, prompts, completions, advantages, cfg)

    weights = loss_weights(torch.tensor([2, 6, 1]), loss_type, cfg.max_completion_length)
    sequences = [
        TokenSequence(
            tokens=torch.tensor(prompt + completion),
            num_prompt_tokens=len(prompt),
            advantage=advantages[i],
            loss_weight=float(weights[i]),
            rollout_logprobs=torch.zeros(len(completion)),
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    batch = pack(sequences, [2, 0, 1], Alignment(), dtype=torch.float64)
    logits = [model(sequences[i].tokens[None], use_cache=False).logits[0] for i in (2, 0, 1)]
    targets = prediction_targets(batch.cu_seqlens, torch.arange(len(batch.tokens)))
    logprobs, _ = chosen_logprobs(
        torch.cat(logits),
        batch.tokens,
        targets,
        batch.loss_mask,
        temperature=cfg.temperature,
        vocab_size=model.config.vocab_size,
        tensor_group=None,
    )
    loss = grpo_loss(
        logprobs, None, None, batch.advantages, batch.loss_weights, batch.loss_mask, **CLIP
    )
    model.zero_grad()
    loss.total.backward()
    assert loss.total.item() == pytest.approx(expected, rel=1e-6)
    for name, parameter in model.named_parameters():
        # 1e-6 and not 1e-9: transformers computes norms and rotations in float32 in any model.
        difference = (parameter.grad - expected_grads[name]).norm() / expected_grads[name].norm()
        assert difference < 1e-6, name
