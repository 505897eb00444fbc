"""Loss and gradient of one optimizer step, by recipe: on ranks, and by the oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert import read_shape
from helpers.models.tiny import PAD_ID
from helpers.oracle.grpo import (
    OracleLoss,
    oracle_advantages,
    oracle_logprobs,
    oracle_model_loss,
    oracle_sequence_kl,
)
from helpers.oracle.policies import gradient_boxes, load_oracle, tiny_config, unstacked
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.advantage_function import AdvantageFunction
from megatron_grpo.batch.distribute import split_for_data_parallel
from megatron_grpo.batch.experience import Experience, subtract_kl
from megatron_grpo.batch.prepare import add_logprobs
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.batch.token_log import VALUES
from megatron_grpo.batch.token_values import sequence_kl, with_advantages
from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.policy.model import Policy, build_policy
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups
from parallel.microbatches import CostModel
from parallel.packing import PackedBatch

NUM_SEQUENCES, MAX_COMPLETION_LENGTH = 12, 24
EMPTY, ONLY_EOS, FAILED = 3, 5, 8
"""Samples with an empty completion, with an end token only, and without a reward."""
TEMPERATURE, BETA = 0.8, 0.05
BETA_AT_FIRST = 0.3
"""`grpo.beta` of the config; BETA is the KL coefficient at the tested step."""
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.3}
NARROW = {"epsilon": 0.03, "epsilon_high": 0.04}
BUDGETS = (64, 4096)  # tokens per microbatch: many small ones, and all in one
Recipe = dict[str, Any]
PLAIN: dict[str, Recipe] = {
    loss_type: {"loss_type": loss_type, **CLIPS, "delta": 1.5}
    for loss_type in ("grpo", "dapo", "dr_grpo")
}
RECIPES: dict[str, Recipe] = PLAIN | {
    "gspo": {
        **NARROW,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": True,
    },
    "gspo-token, forking tokens": {
        **NARROW,
        "loss_type": "bnpo",
        "importance_sampling_level": "sequence_token",
        "kl_estimator": "k2",
        "use_bias_correction_kl": True,
        "top_entropy_quantile": 0.3,
    },
    "cispo, entropy bonus": {
        "loss_type": "cispo",
        "epsilon_high": 1.3,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.3,
        "rollout_importance_sampling_mode": "sequence_mask",
        "rollout_importance_sampling_threshold": 1.15,
        "rollout_importance_sampling_min": 0.8,
    },
    "gmpo": {
        "loss_type": "gmpo",
        **CLIPS,
        "kl_estimator": "k1",
        "use_bias_correction_kl": True,
        "rollout_importance_sampling_mode": "geometric_mask",
        "rollout_importance_sampling_threshold": 1.04,
        "rollout_importance_sampling_min": 0.98,
    },
    "sapo": {
        "loss_type": "sapo",
        "importance_sampling_level": "sequence",
        "sapo_temperature_pos": 2.0,
        "entropy_coef": 0.1,
        # Masked in SAPO, where no clip already removes the gradient of these tokens.
        "off_policy_mask_threshold": 0.02,
        "rollout_importance_sampling_mode": "token_mask",
        "rollout_importance_sampling_threshold": 1.1,
        "rollout_importance_sampling_min": 0.9,
    },
    "luspo": {
        **NARROW,
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "rollout_importance_sampling_mode": "sequence_truncate",
        "rollout_importance_sampling_threshold": 1.15,
        "rollout_importance_sampling_min": 0.8,
    },
    "vespo": {
        "loss_type": "vespo",
        "vespo_k_neg": 1.5,
        "rollout_importance_sampling_mode": "token_truncate",
        "rollout_importance_sampling_threshold": 1.1,
    },
    "old policy of the engine": {**CLIPS, "loss_type": "dapo", "old_logprobs": "rollout"},
    "divergence in the rewards": {
        **CLIPS,
        "loss_type": "dapo",
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "scale_rewards": "batch",
        "kl_in_reward": True,
        "rollout_importance_sampling_mode": "geometric_truncate",
        "rollout_importance_sampling_threshold": 1.04,
        "rollout_importance_sampling_min": 0.98,
    },
}
PROCESS = "gspo-token, process supervision"
"""Each token has its own advantage; with equal ones GSPO-token has GSPO's gradient."""
RECIPES[PROCESS] = {
    **NARROW,
    "loss_type": "grpo",
    "importance_sampling_level": "sequence_token",
}
RECIPES["token weights, rejected sequences"] = {
    **CLIPS,
    "loss_type": "dapo",
    "rollout_importance_sampling_mode": "token_truncate",
    "rollout_importance_sampling_threshold": 1.1,
    "rollout_rs": "geometric",
    "rollout_rs_threshold": 1.04,
    "rollout_rs_threshold_lower": 0.98,
}
RECIPES["a user's own loss"] = {
    "loss_type": f"{Path(__file__).with_name('own_loss.py')}:soft",
    "loss_arguments": {"tau": 2.0},
    "loss_aggregation": "constant",
    "loss_denominator": 7.0,
    "rollout_importance_sampling_mode": "token_truncate",
    "rollout_importance_sampling_threshold": 1.1,
}
RECIPES["supervised, forking tokens"] = {"loss_type": "sft", "top_entropy_quantile": 0.6}

Gradients = dict[str, torch.Tensor]


class Case:
    """A model, a batch of completions of unequal lengths, and the oracle's answers."""

    def __init__(
        self,
        folder: Path,
        recipes: dict[str, Recipe],
        group_sizes: dict[int, int] | None = None,
        retried: Mapping[int, float] | None = None,
    ) -> None:
        """`group_sizes`: number of samples by prompt length; None: a prompt for each sample.
        `retried`: temperatures of samples with their own, by number."""
        self.folder, self.recipes, self.retried = folder, recipes, retried or {}
        self.temperatures = torch.tensor(
            [self.retried.get(i, TEMPERATURE) for i in range(NUM_SEQUENCES)], dtype=torch.float64
        )[:, None, None]
        self.model = load_oracle(folder)
        generator = torch.Generator().manual_seed(1)

        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        def near(logprobs: torch.Tensor, scale: float) -> torch.Tensor:
            noise = scale * torch.randn(logprobs.shape, generator=generator)
            return (logprobs + noise).float().double()

        if group_sizes:
            self.prompts = [p for n, k in group_sizes.items() for p in [draw(4, 250, n)] * k]
        else:
            self.prompts = [draw(4, 250, n) for n in draw(1, 20, NUM_SEQUENCES)]
        self.completions = [
            draw(4, 250, n) for n in draw(1, MAX_COMPLETION_LENGTH + 1, NUM_SEQUENCES)
        ]
        self.completions[EMPTY] = []
        self.completions[ONLY_EOS] = [PAD_ID]  # as with a tokenizer that pads with the end token
        self.advantages = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
        self.token_advantages = [
            torch.randn(len(completion), generator=generator, dtype=torch.float64)
            for completion in self.completions
        ]
        self.rewards = torch.randn(NUM_SEQUENCES, generator=generator).tolist()
        self.rewards[FAILED] = torch.nan
        with torch.no_grad():
            exact = oracle_logprobs(self.model, self.prompts, self.completions, self.temperatures)
        # Off by enough for the clips on both sides, and the dual clip, to bind on some tokens.
        self.logprobs = exact
        self.old_logprobs = [near(logprobs, 0.4) for logprobs in exact]
        self.rollout_logprobs = [near(logprobs, 0.1) for logprobs in self.old_logprobs]

    @cached_property
    def answers(self) -> dict[str, tuple[float, Gradients]]:
        """Loss and gradients of every recipe."""
        return {
            name: self.answer(recipe, range(NUM_SEQUENCES), name == PROCESS)
            for name, recipe in self.recipes.items()
        }

    def answer(
        self, recipe: Recipe, scored: Sequence[int], by_token: bool = False
    ) -> tuple[float, Gradients]:
        """The oracle's loss and gradients if only the `scored` samples have a reward.

        No token of a sample without a reward counts, so the oracle gets an empty completion.
        """

        def counted(values: list[Any]) -> list[Any]:
            return [
                value if i in scored and i != FAILED else value[:0]
                for i, value in enumerate(values)
            ]

        advantages, options = self.advantages, dict(recipe)
        is_engines = options.pop("old_logprobs", None) == "rollout"
        old_logprobs = counted(self.rollout_logprobs if is_engines else self.old_logprobs)
        ref_logprobs = [reference(logprobs) for logprobs in old_logprobs]
        if by_token:
            advantages = [values.tolist() for values in counted(self.token_advantages)]
        if recipe.get("kl_in_reward"):
            kl = oracle_sequence_kl(old_logprobs, ref_logprobs)
            rewards = [reward - BETA * of for reward, of in zip(self.rewards, kl, strict=True)]
            advantages = oracle_advantages(
                [rewards[i : i + 2] for i in range(0, NUM_SEQUENCES, 2)],
                estimator=options.pop("advantage_estimator"),
                scale=options.pop("scale_rewards"),
            )
        loss, gradients = oracle_model_loss(
            self.model,
            self.prompts,
            counted(self.completions),
            advantages,
            OracleLoss(
                max_completion_length=MAX_COMPLETION_LENGTH,
                beta=BETA,
                temperature=self.temperatures,
                **options,
            ),
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=counted(self.rollout_logprobs),
        )
        # Weight files name each expert's matrices.
        stored = revert_weight_conversion(self.model, gradients)
        return loss, unstacked(stored, read_shape(self.folder))

    def experience(self, scored: Sequence[int] = range(NUM_SEQUENCES)) -> "OffPolicy":
        samples = [
            Sample(
                prompt=Prompt(self.prompts.index(prompt), tuple(prompt), text="", row={}),
                sample_index=i,
                completion_ids=tuple(completion),
                logprobs=tuple(logprobs.tolist()),
                finish_reason="stop",
                text="",
                policy_version=0,
                temperature=self.retried.get(i),
            )
            for i, (prompt, completion, logprobs) in enumerate(
                zip(self.prompts, self.completions, self.rollout_logprobs, strict=True)
            )
        ]
        totals = torch.full((NUM_SEQUENCES,), torch.nan, dtype=torch.float64)
        totals[list(scored)] = torch.tensor(self.rewards, dtype=torch.float64)[list(scored)]
        return OffPolicy(
            samples,
            [],
            totals,
            torch.arange(NUM_SEQUENCES) // 2,
            torch.tensor(self.advantages, dtype=torch.float64),
            token_advantages=self.token_advantages,
            old_logprobs=[old.float() for old in self.old_logprobs],
        )


@dataclass(frozen=True, kw_only=True)
class OffPolicy(Experience):
    """An experience with made-up old log-probabilities, [completion tokens] of each sample."""

    old_logprobs: list[torch.Tensor]

    def filled_in(self, batch: PackedBatch) -> PackedBatch:
        """The batch with these old log-probabilities instead of the policy's."""
        old = torch.zeros_like(batch.rollout_logprobs)
        for i in batch.sequence_index[batch.completion_mask].unique().tolist():
            k, place = divmod(i, NUM_SEQUENCES)
            part = self.samples[place].sequences[k]
            mine = (batch.sequence_index == i) & batch.completion_mask
            old[mine] = self.old_logprobs[place][part.start : part.end]
        return replace(batch, old_logprobs=old)


def reference(old_logprobs: torch.Tensor) -> torch.Tensor:
    """A reference policy's log-probabilities, near the old ones."""
    return 0.95 * old_logprobs


Run = tuple[str, int]
"""A recipe's name and a budget of tokens per microbatch."""


def config(
    folder: Path, dims: ParallelDims, recipe: Recipe, budget: int, *overrides: str
) -> Config:
    return tiny_config(
        folder,
        dims,
        *overrides,
        f"train.max_tokens_per_microbatch={budget}",
        f"grpo.generation_batch_size={NUM_SEQUENCES}",
        "grpo.num_generations=2",
        f"grpo.beta={BETA_AT_FIRST}",
        *(f"grpo.{name}={value}" for name, value in recipe.items()),
        *(["train.replay=elsewhere"] if recipe.get("loss_type") == "sft" else []),
        f"rollout.temperature={TEMPERATURE}",
        f"rollout.max_completion_length={MAX_COMPLETION_LENGTH}",
    )


def batches_of(
    policy: Policy, experience: OffPolicy, cfg: Config, groups: Groups
) -> list[PackedBatch]:
    """This rank's microbatches as the trainer prepares them, with made-up old and reference
    log-probabilities."""
    cost, alignment, at = CostModel.transformer(64), cfg.alignment, groups.coordinates
    [shares] = split_for_data_parallel(experience, 0, cost, cfg, groups.dims, alignment)
    packed = shares[at.data].microbatches(
        alignment, share_prompts=cfg.grpo.shared_prompts, context_rank=at.context
    )
    given = [experience.filled_in(batch) for batch in packed]
    batches = add_logprobs(given, policy, None, cfg, groups, is_next=True)
    if policy.is_last_stage:
        batches = [replace(batch, ref_logprobs=reference(batch.old_logprobs)) for batch in batches]
    if cfg.grpo.kl_in_reward:
        kl = sequence_kl([batches], NUM_SEQUENCES, groups)
        compared = subtract_kl(experience, kl[0], BETA, AdvantageFunction.of(cfg))
        [batches] = with_advantages([batches], [compared.advantages])
    return batches


Result = tuple[float, list[Any], torch.Tensor]


def gradients_on_rank(
    rank: int,
    dims: ParallelDims,
    folder: Path,
    experience: OffPolicy,
    configs: dict[Run, Config],
) -> dict[Run, Result]:
    """The loss, this rank's boxes of the gradient, and the token log, for each recipe and
    budget."""
    setup_device(rank)
    cfg = next(iter(configs.values()))
    groups = init_groups(dims, dynamic_context=cfg.parallel.dynamic_context_parallel)
    policy = build_policy(cfg, read_shape(folder), groups)
    results = {}
    for (name, budget), cfg in configs.items():
        by_token = experience.token_advantages if name == PROCESS else None
        own = replace(experience, token_advantages=by_token)
        batches = batches_of(policy, own, cfg, groups)
        metrics = accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), BETA)
        loss = torch.tensor(sum(map(float, metrics.losses)), dtype=torch.float64)
        dist.all_reduce(loss, group=groups.data_context)
        dist.all_reduce(loss, group=groups.pipeline)
        logged = metrics.token_log.values
        for group in (groups.data_context, groups.pipeline):
            dist.all_reduce(logged, group=group)
        results[name, budget] = (float(loss), gradient_boxes(policy), logged)
    return results


def on_ranks(
    case: Case, dims: ParallelDims, experience: OffPolicy, runs: Sequence[Run], *overrides: str
) -> list[dict[Run, Result]]:
    configs = {
        (name, budget): config(case.folder, dims, case.recipes[name], budget, *overrides)
        for name, budget in runs
    }
    return run_ranks(
        dims.world_size, gradients_on_rank, dims, case.folder, experience, configs, timeout=240
    )


def assert_logged(ranks: list[dict[Run, Result]], case: Case, *overrides: str) -> None:
    """Assert that every rank has logged the values of all counting tokens, and zeros after them."""
    cfg = config(case.folder, ParallelDims(), {}, BUDGETS[0], *overrides)
    [indices] = BatchSchedule.of(cfg.grpo).minibatches(0, cfg.train.seed)
    expected = torch.cat([case.logprobs[i] * (i != FAILED) for i in indices]).float()
    for result in ranks:
        for _, _, logged in result.values():
            logprobs, beyond = logged[:, VALUES.index("logprob")].split(
                [len(expected), len(logged) - len(expected)]
            )
            torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
            assert not beyond.any()


def assert_equal(
    ranks: list[dict[Run, Result]],
    answers: dict[str, tuple[float, Gradients]],
    tolerance: float = 1e-5,
) -> None:
    """Assert that the ranks' loss and gradient equal the oracle's `answers`, by recipe."""
    for name, budget in ranks[0]:
        expected_loss, expected = answers[name]
        for result in ranks:
            # Terms of both signs nearly cancel, so rounding errors have their size, not the sum's.
            close = pytest.approx(expected_loss, rel=tolerance, abs=tolerance / 10)
            assert result[name, budget][0] == close
        boxes = [box for result in ranks for box in result[name, budget][1]]
        actual = {tensor: torch.full_like(g, torch.nan) for tensor, g in expected.items()}
        for tensor, box, values in boxes:
            actual[tensor][box.slices].copy_(values)
        for tensor, gradient in expected.items():
            error = (actual[tensor] - gradient).norm() / gradient.norm()
            assert error < tolerance, f"{tensor}: {error:.1e} for {name}, budget {budget}"
