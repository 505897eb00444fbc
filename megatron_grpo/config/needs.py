"""Options that need others, by the names of `features.py`."""

from collections.abc import Iterator

from megatron_grpo.config.config import Config
from megatron_grpo.config.features import as_overrides, default_of, is_on, value_of, without
from megatron_grpo.config.section import Mistake, as_yaml

_MOMENTS = "without it moments are float32"
_STAGES = "it splits layers over pipeline ranks, of which there is 1"
_QUANTIZED = ("rollout.quantization=fp8", "train.export_quantization=fp8")
_CHAT = "it is for the chat template"

NEEDS: dict[tuple[str, str], str | tuple[str, ...]] = {
    # Memory.
    ("train.offload", "rollout.enable_sleep_mode: true"): "it makes room for engines that generate "
    "on the ranks' GPUs while the ranks wait",
    ("train.offload of the reference by name", "grpo.beta"): "grpo.beta=0 loads none",
    ("train.offload_communicators", "train.offload of weights"): (
        "it moves buffers that remain on the GPU after the weights",
        "train.offload=all",
    ),
    (
        "optimizer.exp_avg_dtype: bfloat16",
        "optimizer.use_precision_aware_optimizer: true",
    ): _MOMENTS,
    (
        "optimizer.exp_avg_sq_dtype: bfloat16",
        "optimizer.use_precision_aware_optimizer: true",
    ): _MOMENTS,
    # Generations ahead.
    ("rollout.in_flight_updates", "rollout.max_staleness"): (
        "with 0 no completions are in progress when weights are pushed",
        "rollout.max_staleness=1",
    ),
    ("rollout.max_staleness above 1", "rollout.in_flight_updates: true"): (
        "every push would wait for all completions, which gains nothing over 1",
        "rollout.max_staleness=1",
    ),
    ("rollout.over_sampling", "rollout.in_flight_updates: true"): "it leaves completions in "
    "progress when weights are pushed",
    ("rollout.recompute_kv_cache: false", "rollout.in_flight_updates: true"): "it keeps keys and "
    "values of completions that go on after a push",
    ("rollout.max_staleness", "a correction for older weights"): (
        "samples of older weights would count as samples of the current ones",
        "grpo.old_logprobs=rollout",
        "grpo.rollout_importance_sampling_mode=token_truncate",
    ),
    # Engines.
    ("rollout.indexer_replay", "rollout.engine: sglang"): "vLLM does not report which tokens its "
    "indexers choose",
    (
        "rollout.quantization_aware",
        "rollout.quantization or train.export_quantization",
    ): ("it trains for quantised engines or a quantised export", *_QUANTIZED),
    (
        "rollout.quantization_ignore",
        "rollout.quantization or train.export_quantization",
    ): ("no weights are quantised", *_QUANTIZED),
    # Model and mesh.
    ("model.freeze_vision: false", "data.image_column"): "the vision tower is trained on prompts "
    "with images",
    ("parallel.sequence_parallel: true", "parallel.tensor_parallel_size"): "it splits over "
    "tensor-parallel ranks, and parallel.tensor_parallel_size is 1",
    ("parallel.num_layers_in_first_pipeline_stage", "parallel.pipeline_parallel_size"): _STAGES,
    ("parallel.num_layers_in_last_pipeline_stage", "parallel.pipeline_parallel_size"): _STAGES,
    ("parallel.overlap_param_gather", "parallel.overlap_grad_reduce: true"): "it gathers bucket by "
    "bucket, and only overlap_grad_reduce makes buckets",
    ("parallel.dynamic_context_parallel", "parallel.context_parallel_size"): (
        "there are no ranks to divide",
        "parallel.context_parallel_size=2",
    ),
    # Prompts and rewards.
    ("data.system_prompt", "data.apply_chat_template: true"): _CHAT,
    ("data.chat_template_kwargs", "data.apply_chat_template: true"): _CHAT,
    ("agent", "data.max_prompt_length"): (
        "an agent writes prompts of its own, and it limits the tokens of their messages before "
        "the model's first turn",
        "data.max_prompt_length=1024",
    ),
    ("agent.tools", "rollout.tool_call_parser"): (
        "engines would not find the calls, and each model has a parser of its own",
        "rollout.tool_call_parser=hermes",
    ),
    ("grpo.supervision: process", "rewards of steps"): "it compares these; name an environment in "
    "environment.name, or a reward_model with step_tag",
    ("train.keep_best", "eval.data or eval.sets"): "it compares evaluations; name held-out "
    "prompts, such as eval.data.path=FILE",
    # Divergence and adapters.
    ("grpo.sync_ref_model", "grpo.beta"): (
        "it updates the reference model, and grpo.beta=0 loads none",
        "grpo.beta=0.04",
    ),
    ("grpo.kl_target", "grpo.beta"): ("beta is adapted from an initial one", "grpo.beta=0.04"),
    ("grpo.use_bias_correction_kl", "grpo.kl_in_reward: false with grpo.beta"): (
        "it is for a KL term in the loss",
        "grpo.kl_in_reward=false and grpo.beta=0.04",
    ),
    ("grpo.kl_in_reward: true with grpo.advantage_estimator: grpo", "grpo.beta"): (
        "there is no KL divergence to subtract",
        "grpo.beta=0.04",
    ),
    (
        "grpo.loss_arguments",
        "a grpo.loss_type of a file",
    ): "a built-in loss has keys of its own; set grpo.loss_type to file.py:function",
    ("grpo.loss_type: sft", "train.replay"): "it imitates the completions of another run; set "
    "train.replay to its folder",
    ("lora.adapter_path", "lora.r"): "there are no adapters; set that to the rank in its "
    "adapter_config.json",
}
"""Why the first feature of each pair needs the second, and further remedies, besides turning on the
second by its value or leaving out the first."""

IDLE = {
    "grpo.dynamic_sample: true": (
        "grpo.dynamic_sample_reward",
        "grpo.dynamic_sample_temperature",
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


def unmet_needs(cfg: Config) -> Iterator[Mistake]:
    """Find each feature whose need is not met, and each idle key with a value other than its
    default.

    Values are compared, since a saved config gives every key.
    """
    for (feature, needed), row in NEEDS.items():
        if is_on(cfg, feature) and not is_on(cfg, needed):
            reason, *remedies = (row,) if isinstance(row, str) else row
            on = _turning_on(needed)
            told = ", or ".join([*("that" for _ in on), *remedies])
            yield Mistake(
                f"{as_overrides(cfg, feature)} needs {_as_needed(cfg, needed)}: {reason}; "
                + (f"set {told}, or leave it out" if told else "leave it out"),
                *on,
                *remedies,
                *without(cfg, feature),
            )
    for needed, keys in IDLE.items():
        for key in () if is_on(cfg, needed) else keys:
            value, default = value_of(cfg, key), default_of(cfg, key)
            if value != default:
                without_it = f"{key}={as_yaml(default)}"
                yield Mistake(
                    f"{key}={as_yaml(value)} does nothing without {_as_needed(cfg, needed)}: "
                    f"set that, or {without_it}",
                    *_turning_on(needed),
                    without_it,
                )


def _turning_on(name: str) -> list[str]:
    """The override that turns a feature of one value on; none for other features."""
    key, _, value = name.partition(": ")
    return [f"{key}={value}"] if value and " " not in key + value else []


def _as_needed(cfg: Config, name: str) -> str:
    """Format a feature that is off as overrides, or as a bound of its number: `lora.r above 0`."""
    key = name.split(" with ")[-1]
    default = None if " " in key else default_of(cfg, key)
    words = name.replace(": ", "=")
    return f"{words} above {default:g}" if type(default) in (int, float) else words
