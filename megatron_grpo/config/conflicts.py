"""Features of a run that exclude each other: docs/compatibility.md is printed from this table.

A row is a pair of features, by the names of `features.py`, and the reason why they exclude each
other, or a tuple of it and of overrides of which each mends it, too, besides leaving out one of the
two. To add a conflict, add a row.
"""

from collections.abc import Iterator

from megatron_grpo.config.config import Config
from megatron_grpo.config.features import as_overrides, is_on, without
from megatron_grpo.config.section import Mistake

_GROUPS = "rollout.engine: sglang with rollout.data_parallel_size"
_DRAFTER = "model.mtp_num_layers of a drafter"
_WHITENED = "grpo.advantage_estimator: reinforce_plus_plus or reinforce_plus_plus_baseline"
_BY_SEQUENCE = (
    "grpo.rollout_importance_sampling_mode: sequence_truncate or sequence_mask or "
    "geometric_truncate or geometric_mask"
)
_BALANCED = "model.megatron.moe_router_load_balancing_type: aux_loss"

_FROZEN = "it does not support frozen weights"
_IMAGES = "it does not support images yet"
_LAYER = "it does not support the layer for multi-token prediction"
_TRAINED_DRAFTS = "engines must draft with the layer of model.path, which pushes update"
_UNTRIED = "it is untested with several groups"
_TOWERS = "vision towers are not quantised"
_NO_MODEL = "no supported model has both"
_SHARE = "pushes send each worker its share of the tower, not all of it"
_OTHER_ENGINE = "it is for another engine"
_ALIKE = (
    "it compares the trainer's old log-probabilities with the engines', and they would be equal"
)
_IMITATES = "it imitates tokens, whichever policy has sampled them"
_ADAMW = "it is for AdamW"
_BFLOAT16 = "it is for bfloat16 weights"
_MERGED = "lora.sync=merged"
_COUNTED = "its tokens would be counted by the number of ranks that split them"

CONFLICTS: dict[tuple[str, str], str | tuple[str, ...]] = {
    # Adapters.
    ("train.export_quantization", "lora.r"): _FROZEN,
    ("train.init_from", "lora.r"): _FROZEN,
    ("optimizer.optimizer: muon", "lora.r"): _FROZEN,
    ("parallel.overlap_param_gather", "lora.r"): _FROZEN,
    ("model.megatron.fp8", "lora.r"): _FROZEN,
    ("model.megatron.moe_shared_expert_overlap", "lora.r"): _FROZEN,
    ("model.freeze_vision: false", "lora.r"): "adapters freeze all weights",
    ("lora.sync: adapter", "rollout.engine: sglang"): (
        "adapters are pushed to engines of vLLM alone",
        _MERGED,
    ),
    ("lora.sync: adapter", "rollout.weight_transport: disk"): (
        "adapters are pushed to engines, not read from a folder",
        _MERGED,
    ),
    ("lora.sync: adapter", "rollout.quantization"): (
        "engines would load the weights themselves, and ranks must push quantised ones",
        _MERGED,
    ),
    ("lora.sync: adapter", "rollout.data_parallel_size"): (_UNTRIED, _MERGED),
    ("lora.sync: adapter", "rollout.vllm.load_format: dummy"): (
        "engines would start with random weights, and pushes would not replace them",
        _MERGED,
    ),
    # Generations ahead.
    ("rollout.max_staleness", "rollout.enable_sleep_mode"): "engines that sleep while the ranks "
    "train cannot generate meanwhile",
    ("rollout.over_sampling", "grpo.dynamic_sample_temperature"): "it replaces a group at once by "
    "the next prompt of the data",
    ("rollout.recompute_kv_cache: false", "rollout.engine: sglang"): "SGLang does not empty its "
    "prefix cache while it has requests",
    ("rollout.recompute_kv_cache: false", "rollout.router_replay"): "vLLM caches the experts of a "
    "prefix by its tokens, and would reuse the choices of older weights",
    ("rollout.vllm.speculative_config", "rollout.recompute_kv_cache: false"): "drafts do not "
    "support caches of older weights yet",
    ("rollout.indexer_replay", "rollout.in_flight_updates"): "after a push an engine reads earlier "
    "tokens again, and keeps only its indexers' new choices",
    # Engines.
    ("rollout.vllm", "rollout.engine: sglang"): _OTHER_ENGINE,
    ("rollout.sglang", "rollout.engine: vllm"): _OTHER_ENGINE,
    ("rollout.python", "rollout.engine: vllm"): "engines of vLLM run in the trainer's environment; "
    "leave it out",
    ("rollout.vllm.speculative_config without pushes", "rollout.enable_sleep_mode"): "sleep drops "
    "all weights, and pushes do not restore those that engines draft with",
    ("rollout.tensor_parallel_size", _GROUPS): _UNTRIED,
    ("rollout.in_flight_updates", _GROUPS): _UNTRIED,
    ("rollout.router_replay", _GROUPS): _UNTRIED,
    ("rollout.enable_sleep_mode", _GROUPS): _UNTRIED,
    ("rollout.quantization", _GROUPS): _UNTRIED,
    ("rollout.sglang.limit_mm_data_per_request", _GROUPS): _UNTRIED,
    # Low precision.
    ("rollout.vllm.speculative_config.model", "rollout.quantization"): "engines quantise the "
    "folder of the model alone",
    ("rollout.enable_sleep_mode with rollout.engine: sglang", "rollout.quantization"): "SGLang's "
    "memory saver would lose the scales of keys and values, which no push brings",
    ("rollout.quantization: fp8_channel or int8", "rollout.engine: sglang"): (
        "SGLang transposes weights with a scale per row after loading",
        "rollout.quantization=fp8",
    ),
    ("rollout.quantization of pushes", "model.dtype: float32"): _BFLOAT16,
    ("rollout.quantization_aware", "model.megatron.fp8"): "FP8 would round the rounded weights",
    # Routers and indexers.
    ("model.megatron.moe_router_fusion", "rollout.router_replay"): "its kernel chooses the experts "
    "itself, and cannot be given the engines' choice",
    ("rollout.router_replay", "rollout.vllm.enable_prefix_caching: false"): "vLLM keeps the "
    "experts of tokens in its prefix cache",
    ("rollout.indexer_replay", "rollout.tensor_parallel_size"): "SGLang reports its indexers' "
    "choices only if each worker has all attention heads, as those of rollout.data_parallel_size "
    "have",
    ("rollout.indexer_replay", "rollout.sglang.enable_two_batch_overlap"): "both halves of a batch "
    "would be recorded in the same rows",
    ("rollout.indexer_replay", "rollout.sglang.chunked_prefill_size: -1"): "a whole prompt has too "
    "many tokens to record",
    # The layer for multi-token prediction.
    ("lora.r", "model.mtp_num_layers"): _LAYER,
    ("train.export_quantization", "model.mtp_num_layers"): _LAYER,
    ("optimizer.optimizer_cpu_offload", "model.mtp_num_layers"): _LAYER,
    ("model.megatron.fp8", "model.mtp_num_layers"): _LAYER,
    ("model.megatron.fine_grained_activation_offloading", "model.mtp_num_layers"): _LAYER,
    ("model.megatron.moe_aux_loss_coeff", "model.mtp_num_layers"): _LAYER,
    ("model.megatron.moe_z_loss_coeff", "model.mtp_num_layers"): _LAYER,
    ("rollout.weight_transport: disk", _DRAFTER): _TRAINED_DRAFTS,
    ("rollout.vllm.speculative_config.model", _DRAFTER): _TRAINED_DRAFTS,
    ("rollout.vllm.speculative_config.quantization", _DRAFTER): _TRAINED_DRAFTS,
    ("rollout.vllm.speculative_config.draft_tensor_parallel_size", _DRAFTER): _TRAINED_DRAFTS,
    ("rollout.vllm.load_format: dummy", "rollout.vllm.speculative_config without pushes"): ""
    "engines would draft with random weights",
    # Images.
    ("data.apply_chat_template: false", "data.image_column"): "the chat template places images",
    ("reward_model", "data.image_column"): _IMAGES,
    ("rollout.enable_sleep_mode", "data.image_column"): _IMAGES,
    ("rollout.vllm.speculative_config", "data.image_column"): _IMAGES,
    ("rollout.vllm.load_format: dummy", "data.image_column"): _IMAGES,
    ("rollout.sglang.load_format: dummy", "data.image_column"): _IMAGES,
    ("rollout.quantization", "data.image_column"): _TOWERS,
    ("train.export_quantization", "data.image_column"): _TOWERS,
    ("model.mtp_num_layers", "data.image_column"): _NO_MODEL,
    ("rollout.indexer_replay", "data.image_column"): _NO_MODEL,
    ("rollout.weight_transport: disk", "model.freeze_vision: false"): "workers read only the text "
    "tower from a folder",
    ("rollout.vllm.mm_encoder_tp_mode: data", "model.freeze_vision: false"): _SHARE,
    ("rollout.sglang.mm_enable_dp_encoder", "model.freeze_vision: false"): _SHARE,
    # Dialogues, sources and rewards.
    ("environment", "agent"): "an agent has an environment of its own",
    ("reward_model", "dialogues"): "it scores completions of one turn, the only one that its chat "
    "template places",
    ("rewards in parts", "sources"): "each of sources.by_name has parts of its own",
    ("rewards in parts", "reward.clip_range"): "clip_range clips only the total",
    # Advantages and loss.
    ("grpo.dynamic_sample", "rewards in parts"): "equal totals may have different parts",
    ("grpo.advantage_estimator other than grpo", "rewards in parts"): "parts are compared within "
    "a group",
    ("grpo.scale_rewards: batch or none", "rewards in parts"): "parts are divided by the deviation "
    "of their group",
    ("grpo.kl_in_reward: true", "rewards in parts"): "the KL divergence is subtracted from the "
    "total",
    ("grpo.supervision: process", "grpo.multi_objective_aggregation: normalize_then_sum"): "one "
    "compares steps, the other reward functions",
    ("grpo.scale_rewards: group or none", _WHITENED): "its advantages are divided "
    "by the deviation of the batch",
    ("grpo.scale_rewards: group or batch", "grpo.advantage_estimator of a file"): "your function "
    "scales its advantages itself",
    (
        "grpo.delta",
        "grpo.loss_type: gmpo or cispo or sapo or vespo or sft",
    ): "that has no dual clip",
    ("grpo.rollout_rs", "grpo.loss_type: vespo"): "vespo's own weight is almost 0 for a sequence "
    "far off the policy",
    (_BY_SEQUENCE, "grpo.loss_type: vespo"): (
        "vespo multiplies the tokens' weights into its own weight of the sequence",
        "grpo.rollout_importance_sampling_mode=token_truncate",
        "grpo.rollout_importance_sampling_mode=token_mask",
    ),
    ("grpo.loss_type: sft", "grpo.rollout_importance_sampling_mode"): _IMITATES,
    ("grpo.loss_type: sft", "grpo.rollout_rs"): _IMITATES,
    ("grpo.loss_type: sft", "grpo.off_policy_mask_threshold"): _IMITATES,
    ("grpo.loss_type: sft", "grpo.old_logprobs: rollout"): _IMITATES,
    ("grpo.loss_type: sft", "grpo.use_bias_correction_kl"): _IMITATES,
    ("grpo.loss_type: sft", "rollout.router_replay"): _IMITATES,
    ("grpo.loss_type: sft", "rollout.indexer_replay"): _IMITATES,
    ("grpo.loss_type: sft", "grpo.kl_in_reward: true with grpo.beta"): (
        "it has no rewards",
        "grpo.kl_in_reward=false",
    ),
    ("grpo.rollout_importance_sampling_mode", "grpo.old_logprobs: rollout"): _ALIKE,
    ("grpo.rollout_rs", "grpo.old_logprobs: rollout"): f"{_ALIKE}, as "
    "those of grpo.off_policy_mask_threshold need not be",
    ("grpo.overlong_filter", "grpo.kl_in_reward: true with grpo.beta"): (
        "completions that it masks have no KL divergence to subtract from their rewards",
        "grpo.kl_in_reward=false",
    ),
    ("grpo.scale_rewards: group", "grpo.kl_in_reward: true with grpo.beta"): (
        "where rewards are equal, the KL divergence would be divided by its own spread, so that "
        "grpo.beta has no effect",
        *("grpo.scale_rewards=batch", "grpo.scale_rewards=none", "grpo.kl_in_reward=false"),
    ),
    # Optimizer. Megatron-Core's for the host would not update float32 weights on the GPU.
    ("optimizer.use_precision_aware_optimizer", "optimizer.optimizer: muon"): _ADAMW,
    ("optimizer.optimizer_cpu_offload", "optimizer.optimizer: muon"): _ADAMW,
    ("optimizer.use_precision_aware_optimizer", "optimizer.optimizer_cpu_offload"): "states on the "
    "host stay float32",
    ("optimizer.optimizer_cpu_offload", "model.dtype: float32"): _BFLOAT16,
    ("optimizer.use_precision_aware_optimizer", "model.dtype: float32"): _BFLOAT16,
    ("optimizer.grad_reduce_in_fp32: false", "model.dtype: float32"): _BFLOAT16,
    # Sequences.
    ("parallel.dynamic_context_parallel", "grpo.shared_prompts"): "it does not support prompts "
    "that several sequences share",
    ("model.megatron.cp_comm_type", "grpo.shared_prompts"): "it is for Transformer Engine's "
    "attention, which shared prompts replace",
    ("model.megatron.moe_aux_loss_coeff", "parallel.dynamic_context_parallel"): _COUNTED,
    ("model.megatron.moe_z_loss_coeff", "parallel.dynamic_context_parallel"): _COUNTED,
    (_BALANCED, "parallel.dynamic_context_parallel"): _COUNTED,
    # Length and replays.
    ("train.num_epochs", "data.path with several sets"): "weighted sets complete their epochs at "
    "different times, so that a run needs train.num_steps",
    ("train.replay", "eval.data or eval.sets"): "a replay starts no engines, which evaluations "
    "need",
}
"""Why the features of each pair exclude each other, and further remedies."""


def conflicts(cfg: Config) -> Iterator[Mistake]:
    """Find each pair of features that `cfg` turns on together."""
    for (a, b), row in CONFLICTS.items():
        if is_on(cfg, a) and is_on(cfg, b):
            reason, *remedies = (row,) if isinstance(row, str) else row
            told = f"set {', or '.join(remedies)}, or " if remedies else ""
            yield Mistake(
                f"{as_overrides(cfg, a)} does not go with {as_overrides(cfg, b)}: {reason}; {told}"
                "leave out one of the two",
                *remedies,
                *without(cfg, a),
                *without(cfg, b),
            )
