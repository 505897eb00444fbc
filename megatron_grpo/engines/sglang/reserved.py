"""Arguments of SGLang that `rollout.sglang` cannot have."""

from megatron_grpo.engines.arguments import SPANNING

_PUSHED = "weights are pushed to workers that hold all layers, each split over all of them"
_GROUPS = "set rollout.data_parallel_size"
_HEAD = "each group of workers has the whole head"
_MOVED = "experts would move between workers, but weights are pushed to fixed ones"
_ADAPTERS = "set lora.sync=merged"
_DRAFTS = "the weights of a draft model are not pushed"
_CHANGED = "the trainer would not know how it changes the distribution"
_RENDERED = "the trainer renders prompts, by chat_template.jinja in model.path"
RESERVED = {
    "model_path": "set model.path",
    "tokenizer_path": "engines and trainer use the one in model.path",
    "tokenizer_mode": "engines and trainer use the one in model.path",
    "skip_tokenizer_init": "the trainer asks for the text of completions, too",
    "skip_server_warmup": "its request would lack the token",
    "revision": "model.path is a folder, which has no revisions",
    **dict.fromkeys(
        ("json_model_override_args", "decrypted_config_file"),
        "the trainer follows config.json in model.path",
    ),
    "dtype": "set model.dtype",
    "quantization": "set rollout.quantization",
    "host": "engines of a run listen on the loopback interface; see `megatron-grpo serve --help`",
    "port": "the run chooses a free one; see `megatron-grpo serve --help`",
    "device": "that of the machine",
    "tp_size": "set rollout.tensor_parallel_size",
    "pp_size": _PUSHED,
    **dict.fromkeys(("dp_size", "attn_dp_size", "enable_dp_attention"), _GROUPS),
    "enable_dp_lm_head": _HEAD,
    "enable_tp_lm_head_all_to_all": _HEAD,
    "enable_dp_attention_local_control_broadcast": "groups are paused for a push at the same time",
    "moe_dp_size": _PUSHED,
    "dwdp_size": _PUSHED,
    "enable_prefill_cp": _PUSHED,
    "attn_cp_size": _PUSHED,
    "moe_a2a_backend": _PUSHED,
    "moe_dense_tp_size": _PUSHED,
    "nnodes": SPANNING,
    "node_rank": SPANNING,
    "dist_init_addr": SPANNING,
    "api_key": "every route requires MEGATRON_GRPO_TOKEN",
    "admin_api_key": "every route requires MEGATRON_GRPO_TOKEN",
    **dict.fromkeys(
        ("grpc_port", "grpc_mode", "smg_grpc_mode"), "calls by gRPC would need no token"
    ),
    "weight_version": "it tells which push sampled a token",
    "weight_cache_mode": "pushes would change weights that other processes have",
    "delete_ckpt_after_loading": "ranks and further engines read model.path, too",
    "custom_weight_loader": "weights are received over this project's own channels",
    "tokenizer_worker_num": "one process holds requests back during a push",
    "enable_eplb": _MOVED,
    "ep_num_redundant_experts": _MOVED,
    "init_expert_location": _MOVED,
    "fp8_gemm_runner_backend": "others may round scales to powers of 2: pushed ones would not fit",
    "moe_runner_backend": "other backends reorder expert weights: pushed ones would not fit",
    "disable_shared_experts_fusion": "weights of shared experts are pushed apart from the others'",
    "enforce_shared_experts_fusion": "weights of shared experts are pushed apart from the others'",
    **dict.fromkeys(
        ("enable_lora", "lora_paths", "lora_target_modules", "max_lora_rank"), _ADAPTERS
    ),
    "enable_memory_saver": "set rollout.enable_sleep_mode",
    "enable_return_routed_experts": "set rollout.router_replay",
    "enable_return_indexer_topk": "set rollout.indexer_replay",
    "tool_call_parser": "set rollout.tool_call_parser",
    **dict.fromkeys(
        (
            "speculative_algorithm",
            "speculative_draft_model_path",
            "speculative_num_steps",
            "speculative_num_draft_tokens",
            "speculative_eagle_topk",
        ),
        _DRAFTS,
    ),
    "enable_hierarchical_cache": "keys and values outside the cache would outlive a push",
    "enable_custom_logit_processor": _CHANGED,
    "enable_priority_scheduling": "priorities keep batches in order",
    "schedule_low_priority_values_first": "priorities keep batches in order",
    "disable_priority_preemption": "completions that are begun are not thrown away",
    "priority_scheduling_preemption_threshold": "completions that are begun are not thrown away",
    **dict.fromkeys(
        ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
        "keys and values outside the cache would outlive a push",
    ),
    **dict.fromkeys(
        ("dcp_size", "dcp_replicate_q_proj"), "copies of query weights would outlive a push"
    ),
    **dict.fromkeys(("cpu_offload_gb", "offload_group_size"), "pushed weights stay on the GPU"),
    **dict.fromkeys(
        ("modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
        "set rollout.quantization",
    ),
    "mm_feature_transport": "prompts with images come with the bytes of their pixels",
    "enable_precise_embedding_interpolation": "places of images are the trainer's",
    **dict.fromkeys(
        ("enable_multimodal", "encoder_only", "language_only", "language_model_only"),
        "it follows data.image_column",
    ),
    "enable_mm_global_cache": "features of images outside the engine would outlive a push",
    "max_queued_requests": "an engine gets all requests of a generation at once",
    "disaggregation_mode": _PUSHED,
    "enable_strict_thinking": _CHANGED,
    "preferred_sampling_params": "the trainer would not know how they change the distribution",
    **dict.fromkeys(
        ("enable_watermark", "watermark_config", "watermark_default_enabled"), _CHANGED
    ),
    "watermark_enforce_all": _CHANGED,
    "dllm_algorithm": _CHANGED,
    "allow_auto_truncate": "the trainer would not know what was left out",
    "incremental_streaming_output": "answers are read as SGLang's cumulative ones",
    **dict.fromkeys(
        (
            "chat_template",
            "completion_template",
            "hf_chat_template_name",
            "trust_request_chat_template",
        ),
        _RENDERED,
    ),
    "default_chat_template_kwargs": "set data.chat_template_kwargs",
    "sampling_defaults": "sampling follows rollout.temperature, not the model's own defaults",
}
"""Arguments that a config cannot set, and why."""
