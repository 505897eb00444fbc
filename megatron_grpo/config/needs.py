"""Options that need others, by the names of `features.py`."""

from megatron_grpo.config.config import Config
from megatron_grpo.config.features import as_overrides, default_of, is_on, value_of
from megatron_grpo.config.section import as_yaml

_MOMENTS = "without it moments are float32; set that, or leave it out"
_STAGES = "it splits layers over pipeline ranks, of which there is 1; leave it out, or raise that"
_CHAT = "it is for the chat template; set that, or leave it out"

NEEDS = {
    # Memory.
    ("train.offload", "rollout.enable_sleep_mode: true"): "it makes room for engines that generate "
    "on the ranks' GPUs while the ranks wait; set that, with rollout.max_staleness=0, or "
    "train.offload=none",
    ("train.offload of the reference by name", "grpo.beta"): "grpo.beta=0 loads none; leave "
    "reference out",
    ("train.offload_communicators", "train.offload of weights"): "it moves buffers that remain on "
    "the GPU after the weights; set train.offload=all or a list with weights, or leave it out",
    (
        "optimizer.exp_avg_dtype: bfloat16",
        "optimizer.use_precision_aware_optimizer: true",
    ): _MOMENTS,
    (
        "optimizer.exp_avg_sq_dtype: bfloat16",
        "optimizer.use_precision_aware_optimizer: true",
    ): _MOMENTS,
    # Generations ahead.
    ("rollout.in_flight_updates", "rollout.max_staleness"): "with 0 no completions are in progress "
    "when weights are pushed; set rollout.max_staleness to 1 or more",
    ("rollout.max_staleness above 1", "rollout.in_flight_updates: true"): "every push would wait "
    "for all completions, which gains nothing over 1; set that, or rollout.max_staleness=1",
    ("rollout.over_sampling", "rollout.in_flight_updates: true"): "it leaves completions in "
    "progress when weights are pushed; set that, or rollout.over_sampling=1",
    ("rollout.recompute_kv_cache: false", "rollout.in_flight_updates: true"): "it keeps keys and "
    "values of completions that go on after a push; set that, or leave it out",
    ("rollout.max_staleness", "a correction for older weights"): "samples of older weights would "
    "count as samples of the current ones; set grpo.old_logprobs=rollout, or a "
    "grpo.rollout_importance_sampling_mode such as token_truncate",
    # Engines.
    ("rollout.indexer_replay", "rollout.engine: sglang"): "vLLM does not report which tokens its "
    "indexers choose; set that, or leave it out",
    ("rollout.quantization_aware", "rollout.quantization"): "it trains for quantised engines; set "
    "that to fp8, fp8_channel or int8, or leave it out",
    (
        "rollout.quantization_ignore",
        "rollout.quantization or train.export_quantization",
    ): "no weights are quantised; set one of the two, or leave it out",
    # Model and mesh.
    ("model.freeze_vision: false", "data.image_column"): "the vision tower is trained on prompts "
    "with images; set that, or leave it out",
    ("parallel.sequence_parallel: true", "parallel.tensor_parallel_size"): "it splits over "
    "tensor-parallel ranks, and parallel.tensor_parallel_size is 1; leave it out, or raise that",
    ("parallel.num_layers_in_first_pipeline_stage", "parallel.pipeline_parallel_size"): _STAGES,
    ("parallel.num_layers_in_last_pipeline_stage", "parallel.pipeline_parallel_size"): _STAGES,
    ("parallel.overlap_param_gather", "parallel.overlap_grad_reduce: true"): "it gathers bucket by "
    "bucket, and only overlap_grad_reduce makes buckets; set that as well",
    ("parallel.dynamic_context_parallel", "parallel.context_parallel_size"): "there are no ranks "
    "to divide; set that to 2 or more",
    # Prompts and rewards.
    ("data.system_prompt", "data.apply_chat_template: true"): _CHAT,
    ("data.chat_template_kwargs", "data.apply_chat_template: true"): _CHAT,
    ("agent", "data.max_prompt_length"): "an agent writes prompts of its own; set that to the most "
    "tokens that its messages have before the model's first turn",
    ("agent.tools", "rollout.tool_call_parser"): "engines would not find the calls; set that to "
    "the model's, such as hermes",
    ("grpo.supervision: process", "rewards of steps"): "it compares these; name an environment in "
    "environment.name, or a reward_model with step_tag, or use grpo.supervision=outcome",
    # Divergence and adapters.
    ("grpo.sync_ref_model", "grpo.beta"): "it updates the reference model, and grpo.beta=0 loads "
    "none; use a beta above 0, such as 0.04, or leave it out",
    ("grpo.kl_target", "grpo.beta"): "beta is adapted from an initial one; use a grpo.beta above "
    "0, such as 0.04",
    ("grpo.use_bias_correction_kl", "grpo.kl_in_reward: false with grpo.beta"): "it is for a KL "
    "term in the loss; leave it out, or use grpo.kl_in_reward=false and a grpo.beta above 0",
    ("grpo.kl_in_reward: true with grpo.advantage_estimator: grpo", "grpo.beta"): "there is no KL "
    "divergence to subtract; set that, or grpo.kl_in_reward=false",
    ("grpo.loss_arguments", "a grpo.loss_type of a file"): "a built-in loss has keys of its own; "
    "leave them out, or set grpo.loss_type to file.py:function",
    ("lora.adapter_path", "lora.r"): "there are no adapters; set that to the rank in its "
    "adapter_config.json, or leave it out",
}
"""Why the first feature of each pair needs the second, and after a semicolon the remedy."""

IDLE = {
    "grpo.dynamic_sample: true": (
        "grpo.dynamic_sample_reward",
        "grpo.dynamic_sample_oversampling",
        "grpo.max_resample_times",
    ),
    "a grpo.loss_type that clips, such as dapo": ("grpo.epsilon_high",),
    "a grpo.loss_type that clips below, such as dapo": ("grpo.epsilon",),
    "grpo.loss_aggregation: constant": ("grpo.loss_denominator",),
    "grpo.loss_type: sapo": ("grpo.sapo_temperature_pos", "grpo.sapo_temperature_neg"),
    "grpo.loss_type: vespo": (
        *("grpo.vespo_k_pos", "grpo.vespo_lambda_pos"),
        *("grpo.vespo_k_neg", "grpo.vespo_lambda_neg"),
    ),
    "grpo.sync_ref_model: true": ("grpo.ref_model_mixup_alpha", "grpo.ref_model_sync_steps"),
    "grpo.beta": ("grpo.kl_estimator",),
    "grpo.kl_target": ("grpo.kl_horizon",),
    "grpo.rollout_importance_sampling_mode": (
        "grpo.rollout_importance_sampling_threshold",
        "grpo.rollout_importance_sampling_min",
    ),
    "grpo.rollout_rs": ("grpo.rollout_rs_threshold", "grpo.rollout_rs_threshold_lower"),
    "optimizer.lr_decay_style: WSD": (
        "optimizer.lr_wsd_decay_steps",
        "optimizer.lr_wsd_decay_style",
    ),
    "optimizer.optimizer: muon": ("optimizer.muon_momentum", "optimizer.muon_extra_scale_factor"),
    "optimizer.optimizer_cpu_offload: true": ("optimizer.optimizer_offload_fraction",),
}
"""Keys that do nothing without a feature: whoever sets one expects an effect."""


def check_needs(cfg: Config) -> None:
    """Raise ValueError for the first feature whose need is not met, or an idle key with a value
    other than its default.

    Values are compared, since a saved config gives every key.
    """
    for (feature, needed), reason in NEEDS.items():
        if is_on(cfg, feature) and not is_on(cfg, needed):
            message = f"{as_overrides(cfg, feature)} needs {_as_needed(cfg, needed)}"
            raise ValueError(f"{message}: {reason}")
    for needed, keys in IDLE.items():
        for key in () if is_on(cfg, needed) else keys:
            value, default = value_of(cfg, key), default_of(cfg, key)
            if value != default:
                raise ValueError(
                    f"{key}={as_yaml(value)} does nothing without {_as_needed(cfg, needed)}: "
                    f"set that, or {key}={as_yaml(default)}"
                )


def _as_needed(cfg: Config, name: str) -> str:
    """Format a feature that is off as overrides, or as a bound of its number: `lora.r above 0`."""
    key = name.split(" with ")[-1]
    default = None if " " in key else default_of(cfg, key)
    words = name.replace(": ", "=")
    return f"{words} above {default:g}" if type(default) in (int, float) else words
