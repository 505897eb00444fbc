import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers.oracle.grpo import (
    OracleLoss,
    oracle_advantages,
    oracle_gdpo_advantages,
    oracle_loss,
    oracle_process_advantages,
)
from helpers.oracle.losses import TEMPERATURE, BigramModel, chosen_tokens
from megatron_grpo.algorithm.advantages import (
    group_advantages,
    normalized_sum_advantages,
    process_advantages,
)
from megatron_grpo.algorithm.kl import kl_estimate
from megatron_grpo.algorithm.loss import LossTokens, grpo_loss, loss_weights
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.algorithm.objectives import clipped, gmpo
from megatron_grpo.batch.token_values import keep_high_entropy, with_entropy_weights
from megatron_grpo.config.grpo import LOSS_TYPES, GRPOConfig
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import plan_microbatches
from parallel.packing import PackedBatch, TokenSequence, pack
from parallel.sequences import SequenceMeans

FITTING = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}
"""Options that a loss type requires."""


def grpo_config(**options):
    """Options of the loss; sizes of the batch have no influence on it."""
    return GRPOConfig(generation_batch_size=8, **options)


def loss_of(logprobs, batch, cfg, entropy=None, mask=None, beta=None):
    """`grpo_loss` on one rank; `beta` defaults to the config's."""
    mask = batch.loss_mask if mask is None else mask
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    chosen = chosen_tokens(mask, logprobs, entropy)
    return grpo_loss(
        LossTokens.select(batch, chosen),
        cfg,
        LossFunction.of(cfg),
        cfg.beta if beta is None else beta,
    )


def one_sequence(old=None, *, advantages, weights=None, ref=None, mask=None, rollout=None):
    """A packed batch of one sequence with these values per token; all tokens count."""
    n = len(advantages)
    return PackedBatch(
        tokens=torch.zeros(n, dtype=torch.int64),
        position_ids=torch.arange(n),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        max_seqlen=n,
        sequence_index=torch.zeros(n, dtype=torch.int64),
        completion_mask=torch.ones(n, dtype=torch.bool),
        loss_mask=torch.ones(n, dtype=torch.bool) if mask is None else mask,
        loss_weights=torch.ones_like(advantages) if weights is None else weights,
        advantages=advantages,
        rollout_logprobs=torch.zeros_like(advantages) if rollout is None else rollout,
        old_logprobs=old,
        ref_logprobs=ref,
    )


def token_losses(log_ratio, advantage, **options):
    """Losses of tokens with these log ratios and weight 1, and their gradients by
    log-probability."""
    old = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    batch = one_sequence(old, advantages=advantage * torch.ones_like(old))
    loss = loss_of(logprobs, batch, grpo_config(**options))
    (grad,) = torch.autograd.grad(loss.total, logprobs)
    return loss, grad.tolist()


def test_the_worked_example_of_ratios_clips_and_their_mean():
    loss, grad = token_losses([0.25, -0.30], -1.432)
    assert [f"{r:.3f}" for r in loss.log_ratio.exp().tolist()] == ["1.284", "0.741"]
    objective = -loss.per_token
    # The published -1.838 truncates a product of rounded factors: 1.284 * -1.432 = -1.8387.
    assert objective[0] == pytest.approx(-1.838, abs=1e-3)
    assert f"{objective[1]:.3f}" == "-1.146"
    assert f"{objective.mean():.3f}" == "-1.492"
    assert loss.clipped_low.tolist() == [False, True]
    assert grad[0] == pytest.approx(1.432 * math.exp(0.25))
    assert grad[1] == 0


def test_the_worked_example_of_k3():
    logprob, reference = torch.tensor([-0.476, -0.600], dtype=torch.float64)
    value = kl_estimate(logprob, reference, "k3")
    assert f"{value:.4f}" == "0.0074"


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant", "sum"])
def test_loss_weights_are_finite_when_nothing_counts(aggregation):
    assert loss_weights(torch.zeros(2), aggregation, 10).isfinite().all()
    assert loss_weights(torch.zeros(0), aggregation, 10).tolist() == []


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [
        *product(["grpo", "sapo"], ["token", "sequence", "sequence_token"]),
        ("gmpo", "token"),
    ],
)
def test_an_infinite_ratio_is_clipped_with_a_gradient_of_zero(loss_type, level):
    """An engine may report a token as impossible: 0 times its infinite ratio would be NaN."""
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    for advantage in (1.0, 0.0):
        loss, grad = token_losses([1000.0, 1000.0], advantage, **options)
        assert loss.total.isfinite()
        assert grad == [0.0, 0.0]


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "gmpo"])
def test_clip_metrics_at_advantage_zero_report_nothing(loss_type):
    loss, _ = token_losses([3.0, -3.0], 0.0, loss_type=loss_type, **FITTING.get(loss_type, {}))
    assert not any(mask.any() for mask in loss.values.values())


@pytest.mark.parametrize("delta", [None, 1.5])
def test_the_clipped_surrogate_and_its_gradient_are_the_papers_minimum(delta):
    ratio = torch.linspace(0.05, 3, 60, dtype=torch.float64).repeat(3)
    advantages = torch.tensor([-2.0, 0.0, 0.7], dtype=torch.float64).repeat_interleave(60)
    ours, paper = ratio.clone().requires_grad_(), ratio.clone().requires_grad_()
    clips = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": delta}
    found, _ = clipped(ours, advantages, **clips)
    bounded = paper if delta is None else paper.clamp(max=delta)
    expected = -torch.minimum(bounded * advantages, paper.clamp(0.8, 1.3) * advantages)
    assert torch.equal(found, expected)
    (gradient,), (of_paper,) = (
        torch.autograd.grad(loss.sum(), at) for loss, at in [(found, ours), (expected, paper)]
    )
    assert torch.equal(gradient, of_paper)
    at_bounds = torch.tensor([0.8, 1.3], dtype=torch.float64)
    _, masks = clipped(at_bounds, torch.tensor([-1.0, 1.0]), **clips)
    assert not masks["clipped_low"].any() and not masks["clipped_high"].any()


def test_a_log_ratio_at_a_bound_of_gmpo_is_not_clipped():
    each = SequenceMeans(torch.tensor([1, 1]), None)
    at_bounds, advantages = torch.tensor([-0.25, 0.5]), torch.tensor([-1.0, 1.0])
    _, masks = gmpo(at_bounds, advantages, each, epsilon=0.25, epsilon_high=0.5)
    assert not masks["clipped_low"].any() and not masks["clipped_high"].any()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
def test_values_outside_the_mask_have_no_influence(loss_type, level):
    nan, inf = float("nan"), float("inf")
    mask = torch.tensor([True, False, False, True])
    logprobs = torch.tensor([-1.0, 0.0, 0.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.0, 0.0, 0.7], requires_grad=True)
    other = torch.tensor([-1.1, nan, inf, -1.5])
    batch = one_sequence(
        other,
        ref=other,
        rollout=other,
        advantages=torch.tensor([1.0, nan, 1.0, 1.0]),
        weights=torch.tensor([0.5, nan, 1.0, 0.5]),
        mask=mask,
    )
    batch = replace(batch, entropy_weights=torch.tensor([0.5, nan, 1.0, 0.5]))
    cfg = grpo_config(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        use_bias_correction_kl=True,
        entropy_coef=0.1,
        rollout_importance_sampling_mode="sequence_truncate",
        off_policy_mask_threshold=1.0,
        **FITTING.get(loss_type, {}),
    )
    loss = loss_of(logprobs, batch, cfg, entropy)
    loss.total.backward()
    assert loss.total.isfinite()
    assert len(loss.kl) == 2 and loss.kl.isfinite().all()
    for gradient in (logprobs.grad, entropy.grad):
        assert gradient[[0, 3]].isfinite().all()
        assert (gradient[[0, 3]] != 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_all_masked_is_a_zero_loss_with_a_zero_gradient(loss_type):
    logprobs = torch.zeros(3, requires_grad=True)
    zeros = torch.zeros(3)
    batch = one_sequence(zeros, ref=zeros, advantages=zeros, weights=zeros, mask=zeros.bool())
    cfg = grpo_config(loss_type=loss_type, beta=0.1, **FITTING.get(loss_type, {}))
    loss = loss_of(logprobs, batch, cfg)
    loss.total.backward()
    assert loss.total.item() == 0
    assert logprobs.grad.tolist() == [0, 0, 0]


def test_the_penalty_has_the_adapted_beta_of_the_step():
    new, ref, advantages = torch.tensor([[-0.3, -2.0], [-0.7, -1.1], [1.0, 1.0]]).double()
    batch = one_sequence(ref=ref, advantages=advantages, weights=advantages / 2)
    loss = loss_of(new, batch, grpo_config(beta=0.3), beta=0.07)
    expected = oracle_loss([new], [1.0], OracleLoss(beta=0.3), ref_logprobs=[ref], beta=0.07)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    "log_ratios, log_weights",
    [
        ([25.0, -20.0], [0.0, 0.0]),
        ([-25.0, 20.0], [0.0, 0.0]),
        ([0.0, 0.0], [25.0, -15.0]),
        ([0.0, 0.0], [-25.0, 15.0]),
        ([15.0, 15.0], [0.0, 0.0]),
        ([-15.0, -15.0], [0.0, 0.0]),
    ],
)
def test_vespo_keeps_logarithms_within_the_bounds_of_its_authors(log_ratios, log_weights):
    options = {
        "loss_type": "vespo",
        # With the default values phi is almost 0 at both bounds.
        "vespo_k_pos": 0.1,
        "vespo_lambda_pos": 1e-9,
        "rollout_importance_sampling_mode": "token_truncate",
        "rollout_importance_sampling_threshold": 1e30,
    }
    old = torch.full((2,), -1.0, dtype=torch.float64)
    new, rollout = old + torch.tensor(log_ratios), old - torch.tensor(log_weights)
    ones = torch.ones_like(old)
    batch = one_sequence(old, advantages=ones, weights=ones / 2, rollout=rollout)
    loss = loss_of(new, batch, grpo_config(**options))
    expected = oracle_loss([new], [1.0], OracleLoss(**options), [old], None, [rollout])
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-9, abs=0)


MAX_COMPLETION_LENGTH = 9
PROMPT_LENGTHS = [2, 6, 1, 4, 3, 5, 1]
COMPLETION_LENGTHS = [5, 1, 9, 0, 3, 7, 2]  # one empty
GROUP_IDS = torch.tensor([4, 4, 4, 0, 0, 7, 7])
GROUPS = [slice(0, 3), slice(3, 5), slice(5, 7)]
REWARDS = [0.3, -1.2, 0.9, 2.0, -0.4, 0.0, -2.1]
SCORES = [[r, s] for r, s in zip(REWARDS, [1.0, 1.0, 0.0, 0.5, 0.5, 0.2, 0.9], strict=True)]
STEPS = [[(1, 0.5), (4, 1.0)], [(0, -1.0)], [(2, 0.1), (8, 0.7)], [], [(1, 1.0)], [(6, 0.3)], []]

PACKINGS = [  # layout, tokens per microbatch
    (ParallelDims(), 1000),
    (ParallelDims(), 16),
    (ParallelDims(data=3), 40),
    (ParallelDims(context=2, tensor=2, data=2), 16),
]
LEVELS = {"luspo": ["sequence"], "gmpo": ["token"], "vespo": ["token"]}
RECIPES = [
    (loss_type, level)
    for loss_type in LOSS_TYPES
    for level in LEVELS.get(loss_type, ["token", "sequence", "sequence_token"])
]


def clips(loss_type):
    """Clip options of the loss type; {} if it does not clip."""
    if loss_type in ("sapo", "vespo"):
        return {}
    if loss_type == "cispo":
        return {"epsilon_high": 1.15}
    both = {"epsilon": 0.1, "epsilon_high": 0.15}
    return both if loss_type == "gmpo" else both | {"delta": 1.5}


IN_GROUPS = [REWARDS[group] for group in GROUPS]
FLAT = torch.tensor(REWARDS, dtype=torch.float64)
ADVANTAGES = {
    f"{estimator}, {scale}": (
        lambda e=estimator, s=scale: group_advantages(FLAT, GROUP_IDS, s, estimator=e).tolist(),
        lambda e=estimator, s=scale: oracle_advantages(IN_GROUPS, estimator=e, scale=s),
    )
    for estimator, scales in {
        "grpo": ["group", "batch", "none"],
        "rloo": ["none", "group", "batch"],
        "reinforce_plus_plus": ["batch"],
        "reinforce_plus_plus_baseline": ["batch"],
    }.items()
    for scale in scales
} | {
    "gdpo": (
        lambda: normalized_sum_advantages(
            torch.tensor(SCORES, dtype=torch.float64),
            torch.tensor([1.0, 0.5], dtype=torch.float64),
            GROUP_IDS,
        ).tolist(),
        lambda: oracle_gdpo_advantages([SCORES[group] for group in GROUPS], [1.0, 0.5]),
    ),
    "process": (
        lambda: [a.tolist() for a in process_advantages(STEPS, COMPLETION_LENGTHS, GROUP_IDS)],
        lambda: oracle_process_advantages(
            [STEPS[group] for group in GROUPS], [COMPLETION_LENGTHS[group] for group in GROUPS]
        ),
    ),
}


def random_tokens():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(11, (p + c,), generator=generator)
        for p, c in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
    ]


def packed_batches(options, advantages, rollout, packing):
    """Every microbatch of all data ranks."""
    dims, max_tokens = packing
    tokens = random_tokens()
    lengths = torch.tensor(COMPLETION_LENGTHS)
    aggregation = LOSS_TYPES[options["loss_type"]].aggregation
    weights = loss_weights(lengths, aggregation, MAX_COMPLETION_LENGTH)
    sequences = [
        TokenSequence(
            tokens=tokens[i],
            num_prompt_tokens=PROMPT_LENGTHS[i],
            advantage=torch.tensor(advantages[i], dtype=torch.float64),
            loss_weight=float(weights[i]),
            rollout_logprobs=rollout[i],
        )
        for i in range(len(tokens))
    ]
    alignment = Alignment.for_mesh(dims, sequence_parallel=True)
    plan = plan_microbatches([len(t) for t in tokens], max_tokens, dims, alignment)
    return [
        pack(sequences, members, alignment, dtype=torch.float64)
        for rank in plan
        for members in rank
    ]


def assert_equals_oracle(options, advantages, expected_advantages, packings, one_rank, off_policy):
    """Assert that loss and gradient of the bigram model equal the oracle's under each packing."""
    policy, old, reference = BigramModel(1), BigramModel(2 if off_policy else 1), BigramModel(3)
    engine = BigramModel(4)
    with torch.no_grad():  # the engine differs slightly from the policy that generated
        engine.table.copy_(old.table + 0.1 * engine.table)
    tokens = random_tokens()
    (new, entropies), (olds, _), (refs, _), (rollout, _) = (
        zip(*map(model.of_response, tokens, PROMPT_LENGTHS), strict=True)
        for model in (policy, old, reference, engine)
    )
    cfg = OracleLoss(
        max_completion_length=MAX_COMPLETION_LENGTH, temperature=TEMPERATURE, **options
    )
    values = (
        [logprobs.detach() for logprobs in olds] if off_policy else None,
        [logprobs.detach() for logprobs in refs],
        [logprobs.detach() for logprobs in rollout],
        entropies,
    )
    expected = oracle_loss(new, expected_advantages, cfg, *values)
    (expected_grad,) = torch.autograd.grad(expected, policy.table)
    objective_alone = replace(cfg, beta=0.0, entropy_coef=0.0)
    expected_policy_loss = oracle_loss(new, expected_advantages, objective_alone, *values).item()

    config = grpo_config(**{"kl_in_reward": False, "scale_rewards": "none"} | options)
    for packing in packings:
        batches = packed_batches(options, advantages, [r.detach() for r in rollout], packing)
        with torch.no_grad():
            batches = [
                replace(
                    batch,
                    old_logprobs=old.of_packed(batch)[0] if off_policy else None,
                    ref_logprobs=reference.of_packed(batch)[0] if config.beta else None,
                )
                for batch in batches
            ]
            if config.top_entropy_quantile < 1:
                found = [policy.of_packed(batch)[1] for batch in batches]
                batches = keep_high_entropy(batches, found, config.top_entropy_quantile, one_rank)
            if config.entropy_coef:
                batches = with_entropy_weights(batches, one_rank)
        policy.table.grad, total, policy_loss = None, 0.0, 0.0
        for batch in batches:
            logprobs, entropy = policy.of_packed(batch)
            loss = loss_of(logprobs, batch, config, entropy)
            loss.total.backward()
            total += loss.total.item()
            policy_loss += loss.policy_loss.sum().item()
        assert total == pytest.approx(expected.item(), rel=1e-10, abs=1e-14)
        assert policy_loss == pytest.approx(expected_policy_loss, rel=1e-10, abs=1e-14)
        torch.testing.assert_close(policy.table.grad, expected_grad, rtol=1e-10, atol=1e-13)


# Losses see an advantage as a plain number: each estimator with one loss, and vice versa.
@pytest.mark.parametrize(
    ("loss_type", "level", "estimator"),
    [
        pytest.param(
            *recipe,
            estimator,
            marks=[] if recipe == RECIPES[0] or number == 0 else [pytest.mark.slow],
        )
        for recipe in RECIPES
        for number, estimator in enumerate(ADVANTAGES)
    ],
)
def test_loss_and_gradient_of_any_packing_equal_the_padded_oracle(
    loss_type, level, estimator, one_rank
):
    advantages, expected_advantages = (compute() for compute in ADVANTAGES[estimator])
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.3,
        **clips(loss_type),
    }
    assert_equals_oracle(options, advantages, expected_advantages, PACKINGS[1::2], one_rank, True)


OPTIONS = {
    "on policy": {},
    "no dual clip": {"delta": None},
    "k1": {"kl_estimator": "k1", "use_bias_correction_kl": True},
    "k2": {"kl_estimator": "k2"},
    "kl in the reward": {"kl_in_reward": True, "kl_estimator": "k1"},
    "unbiased kl": {"use_bias_correction_kl": True},
    "top entropy": {"top_entropy_quantile": 0.3},
    "top entropy, none": {"top_entropy_quantile": 0.0},
    "entropy bonus": {"entropy_coef": 0.2},
    "entropy bonus of the top": {"entropy_coef": 0.2, "top_entropy_quantile": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "other temperatures": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 0.7,
    },
    "other gammas": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 0.5,
        "vespo_k_neg": 0.3,
        "vespo_lambda_neg": 0.8,
    },
    **{
        mode: {
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": 1.2,
            "rollout_importance_sampling_min": 0.8,
        }
        for level in ("token", "sequence", "geometric")
        for mode in (f"{level}_truncate", f"{level}_mask")
    },
    **{
        f"rejection by {level}, {mode}": {
            "rollout_importance_sampling_mode": mode,
            "rollout_rs": level,
            "rollout_rs_threshold": 1 + bound,
            "rollout_rs_threshold_lower": 1 - bound,
        }
        for level, mode, bound in [
            ("token", None, 0.1),
            ("sequence", "token_truncate", 0.2),
            ("geometric", "token_truncate", 0.05),
        ]
    },
    "weights of vespo": {
        "loss_type": "vespo",
        "rollout_importance_sampling_mode": "token_truncate",
        "rollout_importance_sampling_threshold": 1.2,
    },
    "everything": {
        "loss_type": "dapo",
        "importance_sampling_level": "sequence_token",
        "kl_estimator": "k2",
        "use_bias_correction_kl": True,
        "top_entropy_quantile": 0.7,
        "entropy_coef": 0.1,
        "off_policy_mask_threshold": 0.2,
        "rollout_importance_sampling_mode": "geometric_truncate",
        "rollout_importance_sampling_threshold": 1.1,
    },
}


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_loss_equals_the_padded_oracle(name, off_policy, one_rank):
    options = {"loss_type": "grpo", "beta": 0.3} | OPTIONS[name]
    options = clips(options["loss_type"]) | options
    assert_equals_oracle(options, REWARDS, REWARDS, PACKINGS, one_rank, off_policy)


@pytest.mark.parametrize("completion", [[], [0], [0, 0], [7, 0]])
def test_a_token_that_is_also_the_padding_counts_where_it_was_sampled(completion):
    # Token 0 is padding and also sampled here: not at all, alone, twice, and last.
    policy, prompts = BigramModel(1), [[5, 0], [0], [8]]
    completions = [[4, 0], completion, [6]]
    sequences = [
        TokenSequence(
            tokens=torch.tensor(prompt + own),
            num_prompt_tokens=len(prompt),
            advantage=1.0,
            loss_weight=1.0,
            rollout_logprobs=torch.zeros(len(own)),
        )
        for prompt, own in zip(prompts, completions, strict=True)
    ]
    alignment = Alignment(sequence=8, total=8)
    batch = pack(sequences, [0, 1, 2], alignment, dtype=torch.float64)
    logprobs, entropy = policy.of_packed(batch)
    cfg = grpo_config(loss_type="cispo", epsilon_high=5.0)  # its loss is -logprob here
    loss = loss_of(logprobs, batch, cfg, entropy)
    expected = [
        policy.of_response(sequence.tokens, sequence.num_prompt_tokens)[0].sum().item()
        for sequence in sequences
    ]
    assert batch.loss_mask.sum() == sum(map(len, completions))
    assert loss.total.item() == pytest.approx(-sum(expected), rel=1e-12)
