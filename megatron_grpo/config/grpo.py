"""The table `grpo` of the config: batch sizes, advantages and loss."""

import math
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron_grpo.config.rollout import MIN_TEMPERATURE
from megatron_grpo.config.section import Mistake, Section

LossAggregation = Literal["token", "sequence", "constant", "sum"]
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


class LossType(NamedTuple):
    """A built-in `grpo.loss_type`."""

    function: str
    """Name in `algorithm/objectives.py`."""
    aggregation: LossAggregation
    keys: tuple[str, ...]
    """Keys of `grpo` that are arguments of the function."""
    level: ImportanceLevel | None = None
    """The only level of the importance ratio that it has; None: any."""


_CLIP = ("epsilon", "epsilon_high", "delta")
_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
LOSS_TYPES = {
    "grpo": LossType("clipped", "sequence", _CLIP),
    "bnpo": LossType("clipped", "token", _CLIP),
    "dapo": LossType("clipped", "token", _CLIP),
    "dr_grpo": LossType("clipped", "constant", _CLIP),
    "cispo": LossType("cispo", "token", ("epsilon_high",)),
    "gmpo": LossType("gmpo", "sequence", ("epsilon", "epsilon_high"), "token"),
    "sapo": LossType("sapo", "sequence", _SAPO),
    "luspo": LossType("clipped", "sum", _CLIP, "sequence"),
    "vespo": LossType("vespo", "token", _VESPO, "token"),
    "sft": LossType("sft", "token", ()),
}
"""To add a loss: its function, a line here, and its formula in tests/helpers/oracle/grpo.py."""
SCALE_REWARDS: dict[str, ScaleRewards] = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}
"""Built-in `grpo.advantage_estimator`, with the default of `grpo.scale_rewards`."""
_KL_IN_REWARD = SCALE_REWARDS.keys() - {"grpo"}


class GRPOConfig(Section):
    """Batch sizes, advantages and loss, with the names that TRL and ms-swift use."""

    num_generations: PositiveInt = 8
    """Completions per prompt. They form a group, within which rewards are compared."""
    generation_batch_size: PositiveInt
    """Completions per generation, over all ranks; a multiple of num_generations and of
    steps_per_generation."""
    steps_per_generation: PositiveInt = 1
    """Optimizer batches that one generation is split into (TRL uses the name for micro-steps)."""
    num_iterations: PositiveInt = 1
    """Passes over each generation."""
    shared_prompts: bool = False
    """Compute each prompt once per microbatch, for all completions; minibatches keep groups
    together."""

    dynamic_sample: bool = False
    """Replace prompts whose completions all have the same reward by other prompts (DAPO)."""
    dynamic_sample_reward: str | None = None
    """With dynamic_sample, the reward function whose scores must differ: its name without its file,
    or `environment`. Null: the total reward."""
    dynamic_sample_temperature: float | None = Field(default=None, ge=MIN_TEMPERATURE)
    """With dynamic_sample, the first round retries the same prompts at this temperature, which the
    trainer divides their logits by, too. Null: all rounds try other prompts."""
    dynamic_sample_oversampling: float = Field(default=1.0, ge=1)
    """With dynamic_sample, prompts tried per missing prompt and round, at least 1. More save
    rounds; surplus prompts are dropped."""
    max_resample_times: PositiveInt = 3
    """With dynamic_sample, maximum rounds of replacement; afterwards the remaining groups with
    equal rewards are kept."""
    overlong_filter: bool = False
    """Leave completions that reached the length limit out of the loss."""

    advantage_estimator: str = "grpo"
    """Baseline of a reward: the group's mean (`grpo`, `reinforce_plus_plus_baseline`), the mean of
    the group's other rewards (`rloo`), the batch mean (`reinforce_plus_plus`), or your function,
    `file.py:function`."""
    # Pydantic gives a default factory only the fields above its own: their order matters.
    scale_rewards: ScaleRewards = Field(
        default_factory=lambda data: SCALE_REWARDS.get(data.get("advantage_estimator", ""), "none")
    )
    """Standard deviation that divides the advantages; default: `group` for the estimator grpo,
    `batch` for the two reinforce_plus_plus, `none` otherwise."""
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    """Order for several rewards; `normalize_then_sum` normalises each in its group first (GDPO)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """Rewards per completion (`outcome`), or per step of an environment or a process reward model
    (`process`, DeepSeekMath)."""

    loss_type: str = "dapo"
    """Objective: `grpo`, `bnpo`, `dapo`, `dr_grpo`, `cispo`, `gmpo`, `sapo`, `luspo`, `vespo`,
    your function, `file.py:function`, or `sft`, the cross-entropy of another run's completions
    (docs/algorithms.md)."""
    loss_arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of your function in loss_type."""
    loss_aggregation: LossAggregation | None = None
    """Average over tokens: of all tokens alike (`token`), of the means of completions (`sequence`),
    of their sums (`sum`), or of their sums divided by loss_denominator (`constant`); null: the loss
    type's own, `token` for your function."""
    loss_denominator: PositiveFloat | None = None
    """With loss_aggregation constant, the divisor; null: rollout.max_completion_length."""
    importance_sampling_level: ImportanceLevel = "token"
    """Level of the importance ratio; `sequence` is GSPO, `sequence_token` GSPO-token."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip: 1 - epsilon; gmpo: exp(-epsilon)."""
    epsilon_high: PositiveFloat = Field(default_factory=lambda data: data["epsilon"])
    """Upper clip: 1 + epsilon_high; cispo: epsilon_high itself, at least 1; gmpo:
    exp(epsilon_high). Default: epsilon."""
    delta: float | None = None
    """Dual clip: upper bound of the ratio for negative advantages, above 1 + epsilon_high; null: no
    bound."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate for positive advantages."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """sapo: temperature of the gate for advantages of at most 0."""
    vespo_k_pos: PositiveFloat = 2.0
    """vespo: k for advantages of at least 0."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """vespo: lambda for advantages of at least 0."""
    vespo_k_neg: PositiveFloat = 3.0
    """vespo: k for negative advantages."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """vespo: lambda for negative advantages."""
    top_entropy_quantile: float = Field(default=1.0, ge=0, le=1)
    """Share of tokens in the objective, from the highest entropy down; 1: all."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the mean token entropy in the objective."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model; 0: no reference is loaded."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656); false: it stays fixed."""
    ref_model_mixup_alpha: float = Field(default=0.6, gt=0, le=1)
    """TR-DPO's alpha, the weight of the policy in an update of the reference; 1: a copy."""
    ref_model_sync_steps: PositiveInt = 512
    """TR-DPO's tau, optimizer steps between updates of the reference; generations that begin later
    use the new one."""
    kl_in_reward: bool = Field(
        default_factory=lambda data: data.get("advantage_estimator", "grpo") in _KL_IN_REWARD
    )
    """Subtract the KL divergence from the rewards instead of adding it to the loss; default: true
    for the estimators rloo, reinforce_plus_plus and reinforce_plus_plus_baseline, else false."""
    kl_estimator: KLEstimator = Field(
        default_factory=lambda data: "k1" if data["kl_in_reward"] else "k3"
    )
    """Estimator of the KL divergence (joschu.net/blog/kl-approx.html); default: k1 in the reward,
    k3 in the loss."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate in the loss by the ratio: k1 and k3 then have unbiased gradients."""
    kl_target: PositiveFloat | None = None
    """KL divergence per token that beta is adapted towards after every step; null: beta is
    fixed."""
    kl_horizon: PositiveInt = 10000
    """Completions over which beta changes by at most 20%."""

    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Source of old log-probabilities: a forward pass of the trainer (`recompute`) or the engines
    (`rollout`)."""
    rollout_importance_sampling_mode: MismatchMode | None = None
    """Importance weight of trainer over engine, by token, sequence or geometric mean. Out of bounds
    it is clamped (`truncate`) or 0 (`mask`); null: no weight."""
    rollout_importance_sampling_threshold: float = Field(default=2.0, gt=1)
    """Upper bound of the rollout importance weights, above 1."""
    rollout_importance_sampling_min: float = Field(default=0.0, ge=0, lt=1)
    """Lower bound of the rollout importance weights, below 1."""
    rollout_rs: MismatchLevel | None = None
    """Rejection sampling: leave out tokens whose ratio of trainer over engine, by token, sequence
    or geometric mean, is out of bounds; null: keep all."""
    rollout_rs_threshold: float = Field(default=2.0, gt=1)
    """Upper bound of rollout_rs, above 1."""
    rollout_rs_threshold_lower: float = Field(
        default_factory=lambda data: 1 / data["rollout_rs_threshold"], ge=0, lt=1
    )
    """Lower bound of rollout_rs, below 1; default: 1 / rollout_rs_threshold."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Leave out completions with a negative advantage whose mean log-probability per token fell by
    more than this since sampling; null: keep all."""

    file_sha256: dict[str, str] = Field(default={})
    """Hashes of your files in loss_type and advantage_estimator, which the run writes down; a file
    with another hash is refused."""

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the loss corrects engines' log-probabilities, where they differ from the
        trainer's."""
        weighs = self.rollout_importance_sampling_mode is not None or self.rollout_rs is not None
        return weighs or self.old_logprobs == "rollout"

    @property
    def compares_parts(self) -> bool:
        """Whether advantages compare parts of the rewards instead of totals."""
        normalizes_each = self.multi_objective_aggregation == "normalize_then_sum"
        return normalizes_each or self.supervision == "process"

    @property
    def aggregation(self) -> LossAggregation:
        """Average over tokens, of the loss type unless given."""
        known = LOSS_TYPES.get(self.loss_type)
        return self.loss_aggregation or (known.aggregation if known else "token")

    def takes(self, key: str) -> bool:
        """Whether the loss has the key as an argument; a function of the user's may."""
        known = LOSS_TYPES.get(self.loss_type)
        return known is None or key in known.keys

    @property
    def own_functions(self) -> dict[str, str]:
        """`file.py:function` of the user's own loss and advantages, by key."""
        keys = ("loss_type", "advantage_estimator")
        return {key: name for key in keys if ":" in (name := getattr(self, key))}

    @property
    def recomputes_old(self) -> bool:
        """Whether the trainer computes old log-probabilities; `sft` compares no policies."""
        return self.old_logprobs == "recompute" and self.loss_type != "sft"

    @property
    def num_old_passes(self) -> int:
        """Optimizer batches of a generation with a forward pass before training on the generation.

        A quantile of entropies, or a KL in the rewards, needs all of them. Otherwise the first
        batch takes the log-probabilities of its forward in training.
        """
        is_kl_reward = self.beta > 0 and self.kl_in_reward
        if self.top_entropy_quantile < 1 or (self.recomputes_old and is_kl_reward):
            return self.steps_per_generation
        return self.steps_per_generation - 1 if self.recomputes_old else 0

    @field_validator("loss_type", "advantage_estimator")
    @classmethod
    def _names_a_function(cls, value: str, info: ValidationInfo) -> str:
        known = LOSS_TYPES if info.field_name == "loss_type" else SCALE_REWARDS
        if value not in known and not all(value.rpartition(":")):
            raise ValueError(
                f"grpo.{info.field_name} {value!r} is unknown: use {', '.join(known)}, or "
                "file.py:function"
            )
        return value

    @model_validator(mode="after")
    def _clips_fit(self) -> Self:
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise Mistake(
                f"grpo.epsilon_high {self.epsilon_high} is the upper bound of the ratio itself for "
                "cispo and would clip ratios of 1: use at least 1, such as 5.0",
                "grpo.epsilon_high=5.0",
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            legal = math.floor(1 + self.epsilon_high) + 1.0
            raise Mistake(
                f"grpo.delta {self.delta} would also clip ratios of positive advantages, which "
                f"1 + grpo.epsilon_high = {1 + self.epsilon_high} allows: use a larger one, "
                f"such as {legal}",
                f"grpo.delta={legal}",
            )
        wanted = LOSS_TYPES[self.loss_type].level if self.loss_type in LOSS_TYPES else None
        if wanted and self.importance_sampling_level != wanted:
            raise Mistake(
                f"grpo.loss_type {self.loss_type} has a ratio of its own: set "
                f"grpo.importance_sampling_level={wanted}, not {self.importance_sampling_level}",
                f"grpo.importance_sampling_level={wanted}",
            )
        return self

    @model_validator(mode="after")
    def _advantages_fit(self) -> Self:
        compares_batch = self.advantage_estimator == "reinforce_plus_plus"
        compares_batch = compares_batch or "advantage_estimator" in self.own_functions
        if self.num_generations < 2 and not compares_batch:
            raise Mistake(
                f"grpo.num_generations {self.num_generations}: a completion is compared with the "
                "others of its prompt, use at least 2 (1 is enough for "
                "grpo.advantage_estimator=reinforce_plus_plus)",
                "grpo.num_generations=2",
                "grpo.advantage_estimator=reinforce_plus_plus",
            )
        if self.dynamic_sample and self.num_generations < 2:
            raise Mistake(
                "grpo.dynamic_sample true needs groups with different rewards, and with "
                "grpo.num_generations 1 there are none: use dynamic_sample false, or at least 2 "
                "generations",
                "grpo.dynamic_sample=false",
                "grpo.num_generations=2",
            )
        return self

    @model_validator(mode="after")
    def _divergence_holds_the_policy_back(self) -> Self:
        """Raise ValueError for a KL estimator that would not keep the policy near the reference.

        A reward multiplies the gradient of log p. With k1 = log p - log q the mean of the product
        is the gradient of KL(p || q). With k3 it is that gradient minus the gradient of KL(q || p),
        which drives p away from q. In the loss k1 itself is differentiated, and q drops out.
        """
        if self.beta == 0:
            return self
        if self.kl_in_reward and self.kl_estimator != "k1":
            raise Mistake(
                f"grpo.kl_estimator {self.kl_estimator} in the reward does not hold the policy "
                "near the reference: leave it out, for k1, or use grpo.kl_in_reward=false",
                "grpo.kl_in_reward=false",
                "grpo.kl_estimator=k1",
            )
        if not self.kl_in_reward and self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            raise Mistake(
                "grpo.kl_estimator k1 in the loss has a gradient without the reference in it: use "
                "k2 or k3, or grpo.use_bias_correction_kl=true",
                "grpo.use_bias_correction_kl=true",
                "grpo.kl_estimator=k3",
            )
        return self
