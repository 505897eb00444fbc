"""The table `grpo` of the config: batch sizes, advantages and loss."""

import math
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from checkpoint_convert.shape import ModelShape
from megatron_grpo.config.section import Section

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "gmpo", "sapo", "luspo", "vespo"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ScaleRewards = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
ImportanceLevel = Literal["token", "sequence", "sequence_token"]
KLEstimator = Literal["k1", "k2", "k3"]
MismatchLevel = Literal["token", "sequence", "geometric"]
MismatchMode = Literal[
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]

_SCALE_OF: dict[str, ScaleRewards] = {"grpo": "group", "rloo": "none"}


class GRPOConfig(Section):
    """Batch sizes, advantages and loss, with the names that TRL and ms-swift use."""

    num_generations: PositiveInt = 8
    """Completions per prompt: the group whose rewards are compared with each other."""
    generation_batch_size: PositiveInt
    """Completions per generation, over all ranks; a multiple of num_generations and of
    steps_per_generation."""
    steps_per_generation: PositiveInt = 1
    """Optimizer batches that one generation is split into (TRL uses the name for micro-steps)."""
    num_iterations: PositiveInt = 1
    """Passes over each generation."""
    shared_prompts: bool = False
    """Compute the prompt of a group once per microbatch; minibatches then keep groups together."""

    dynamic_sample: bool = False
    """Replace prompts whose completions all have the same reward with other prompts (DAPO)."""
    dynamic_sample_reward: str | None = None
    """With dynamic_sample, the reward function whose scores must differ, by name without its file,
    or `environment`; null: the total reward."""
    dynamic_sample_oversampling: float = Field(default=1.0, ge=1)
    """With dynamic_sample, prompts tried per missing prompt in a round of replacement, at least 1;
    more make fewer rounds, and prompts found beyond those missing are dropped."""
    max_resample_times: PositiveInt = 3
    """With dynamic_sample, maximum rounds of replacement; groups still missing have equal
    rewards."""
    overlong_filter: bool = False
    """Leave completions that reached the length limit out of the loss."""

    advantage_estimator: AdvantageEstimator = "grpo"
    """Baseline of a reward: `grpo` and `reinforce_plus_plus_baseline` its group's mean, `rloo` the
    mean of the others in the group, `reinforce_plus_plus` the batch mean."""
    scale_rewards: ScaleRewards = Field(
        default_factory=lambda data: _SCALE_OF.get(data["advantage_estimator"], "batch")
    )
    """Standard deviation that divides the advantages; default: `group` for the estimator grpo,
    `none` for rloo, `batch` for the others."""
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    """Whether rewards are summed and then normalized, or each normalized and then summed (GDPO)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """`outcome`: one reward per completion; `process`: one per step of an environment or of a
    process reward model (DeepSeekMath)."""

    loss_type: LossType = "dapo"
    """The objective, and how it is averaged over tokens."""
    importance_sampling_level: ImportanceLevel = "token"
    """Level of the importance ratio; `sequence` is GSPO, `sequence_token` GSPO-token."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - epsilon; gmpo: at exp(-epsilon)."""
    epsilon_high: PositiveFloat = Field(default_factory=lambda data: data["epsilon"])
    """The ratio is clipped from above at 1 + epsilon_high; cispo: at epsilon_high, at least 1;
    gmpo: at exp(epsilon_high); default: epsilon."""
    delta: float | None = None
    """Dual clip: upper bound of the ratio for negative advantages, above 1 + epsilon_high; null:
    none."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate for positive advantages."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """sapo: temperature of the gate for all other advantages."""
    vespo_k_pos: PositiveFloat = 2.0
    """vespo: k for advantages of at least 0."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """vespo: lambda for advantages of at least 0."""
    vespo_k_neg: PositiveFloat = 3.0
    """vespo: k for negative advantages."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """vespo: lambda for negative advantages."""
    top_entropy_quantile: float = Field(default=1.0, ge=0, le=1)
    """Share of tokens, those with the highest entropy, that the objective is taken over; 1: all."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the mean token entropy, which is added to the objective."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model; 0: no reference is loaded."""
    sync_ref_model: bool = False
    """Whether the reference follows the policy (TR-DPO); false: it stays at `model.path`."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0, le=1)
    """Weight of the policy in an update of the reference, alpha of TR-DPO (arXiv 2404.09656); 1: a
    copy."""
    ref_model_sync_steps: PositiveInt = 512
    """Optimizer steps between updates of the reference, tau of TR-DPO; generations that begin later
    use the new one."""
    kl_in_reward: bool = Field(default_factory=lambda data: data["advantage_estimator"] != "grpo")
    """Subtract the KL divergence from the rewards instead of adding it to the loss; default: false
    for the estimator grpo, true for the others."""
    kl_estimator: KLEstimator = Field(
        default_factory=lambda data: "k1" if data["kl_in_reward"] else "k3"
    )
    """Estimator of the KL divergence from sampled tokens (joschu.net/blog/kl-approx.html); default:
    k1 in the reward, k3 in the loss."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate in the loss by the ratio, so k1 and k3 have an unbiased gradient."""
    kl_target: PositiveFloat | None = None
    """Target KL divergence per token, to which beta is adapted after every step; null: beta is
    fixed."""
    kl_horizon: PositiveInt = 10000
    """Number of completions over which beta changes by at most 20%."""

    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Source of old log-probabilities: `recompute`: a forward pass of the trainer; `rollout`: the
    engines."""
    rollout_importance_sampling_mode: MismatchMode | None = None
    """Importance weight of trainer over engine by token, sequence or geometric mean; beyond the
    bounds it is clamped (truncate) or 0 (mask); null: no weight."""
    rollout_importance_sampling_threshold: float = Field(default=2.0, gt=1)
    """Upper bound of the rollout importance weights, above 1."""
    rollout_importance_sampling_min: float = Field(default=0.0, ge=0, lt=1)
    """Lower bound of the rollout importance weights, below 1."""
    rollout_rs: MismatchLevel | None = None
    """Leave out of the objective tokens whose ratio of trainer over engine, by token, sequence or
    geometric mean, is beyond bounds of its own, whatever weighs the others; null: none."""
    rollout_rs_threshold: float = Field(default=2.0, gt=1)
    """Upper bound of the ratios that rollout_rs compares, above 1."""
    rollout_rs_threshold_lower: float = Field(
        default_factory=lambda data: 1 / data["rollout_rs_threshold"], ge=0, lt=1
    )
    """Lower bound of the ratios that rollout_rs compares, below 1; default: 1 over the upper."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Leave out of the objective completions with a negative advantage whose mean log-probability
    per token has fallen by more than this since they were sampled; null: keep all."""

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the loss accounts for engines that compute other log-probabilities."""
        weighs = self.rollout_importance_sampling_mode is not None or self.rollout_rs is not None
        return weighs or self.old_logprobs == "rollout"

    @property
    def compares_parts(self) -> bool:
        """Whether advantages compare parts of the rewards, rather than totals."""
        normalizes_each = self.multi_objective_aggregation == "normalize_then_sum"
        return normalizes_each or self.supervision == "process"

    @property
    def has_clip(self) -> bool:
        """Whether the loss type clips ratios, rather than weigh them by a smooth function."""
        return self.loss_type not in ("sapo", "vespo")

    @property
    def num_old_passes(self) -> int:
        """Over how many optimizer batches of a generation the policy runs before training on them.

        Entropies are needed beforehand of all of them, and so are old log-probabilities when the KL
        is part of the rewards. Otherwise the first batch's are those of its forward in training.
        """
        is_kl_reward = self.beta > 0 and self.kl_in_reward
        if self.top_entropy_quantile < 1 or (self.old_logprobs == "recompute" and is_kl_reward):
            return self.steps_per_generation
        return self.steps_per_generation - 1 if self.old_logprobs == "recompute" else 0

    @model_validator(mode="after")
    def _clips_fit(self) -> Self:
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise ValueError(
                f"grpo.epsilon_high {self.epsilon_high} is the upper bound of the ratio itself for "
                "cispo and would clip ratios of 1: use at least 1, such as 5.0"
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            raise ValueError(
                f"grpo.delta {self.delta} would also clip ratios of positive advantages, which "
                f"1 + grpo.epsilon_high = {1 + self.epsilon_high} allows: use a larger one, "
                f"such as {math.floor(1 + self.epsilon_high) + 1.0}"
            )
        wanted = {"luspo": "sequence", "gmpo": "token", "vespo": "token"}.get(self.loss_type)
        if wanted and self.importance_sampling_level != wanted:
            raise ValueError(
                f"grpo.loss_type {self.loss_type} has a ratio of its own: set "
                f"grpo.importance_sampling_level={wanted}, not {self.importance_sampling_level}"
            )
        return self

    @model_validator(mode="after")
    def _advantages_fit(self) -> Self:
        if self.num_generations < 2 and self.advantage_estimator != "reinforce_plus_plus":
            raise ValueError(
                f"grpo.num_generations {self.num_generations}: a completion is compared with the "
                "others of its prompt, use at least 2 (1 is enough for "
                "grpo.advantage_estimator=reinforce_plus_plus)"
            )
        if self.dynamic_sample and self.num_generations < 2:
            raise ValueError(
                "grpo.dynamic_sample true needs groups with different rewards, and with "
                "grpo.num_generations 1 there are none: use dynamic_sample false, or at least 2 "
                "generations"
            )
        return self

    @model_validator(mode="after")
    def _divergence_holds_the_policy_back(self) -> Self:
        """Raise ValueError for a KL estimator that would not keep the policy near the reference.

        A reward multiplies the gradient of log p. With k1 = log p - log q the mean of the product
        is the gradient of KL(p || q); with k3 it is that minus the gradient of KL(q || p), which
        drives p away from q. In the loss k1 itself is differentiated, and q drops out.
        """
        if self.beta == 0:
            return self
        if self.kl_in_reward and self.kl_estimator != "k1":
            raise ValueError(
                f"grpo.kl_estimator {self.kl_estimator} in the reward does not hold the policy "
                "near the reference: leave it out, for k1, or use grpo.kl_in_reward=false"
            )
        if not self.kl_in_reward and self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            raise ValueError(
                "grpo.kl_estimator k1 in the loss has a gradient without the reference in it: use "
                "k2 or k3, or grpo.use_bias_correction_kl=true"
            )
        return self


def check_shared_prompts(grpo: GRPOConfig, shape: ModelShape) -> None:
    """Raise ValueError if a model of `shape` cannot share prompts, and the config says it does."""
    if grpo.shared_prompts and shape.indexer is not None:
        raise ValueError(
            "grpo.shared_prompts true is not supported for a model with sparse attention: leave it "
            "out"
        )
