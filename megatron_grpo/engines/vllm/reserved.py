"""Arguments of vLLM that `rollout.vllm` cannot have."""

from megatron_grpo.engines.arguments import SPANNING

OF_ADAPTERS = "engines hold one adapter, in the form that is pushed: see the section lora"

KEPT_ELSEWHERE = "keys and values outside the GPU's cache would outlive a push of new weights"
OFFLOADED = "weights in host memory would replace those that were pushed; use more GPUs per engine"

SAMPLED = (
    "sampling follows rollout.temperature, rollout.max_completion_length and "
    "rollout.stop_token_ids, not the model's own defaults"
)
UNKNOWN_CHANGE = "the trainer would not know how they change the distribution"
DRAFTS = "set rollout.vllm.speculative_config"
REVISION = "model.path is a folder, which has no revisions"
QUEUE = "an engine gets all requests of a generation at once"
RENDERED = "the trainer renders prompts, by chat_template.jinja in model.path"

RESERVED = {
    "model": "set model.path",
    "model_weights": "set model.path",
    "revision": REVISION,
    "code_revision": REVISION,
    "tokenizer_revision": REVISION,
    "dtype": "set model.dtype",
    "tokenizer": "engines and trainer use the one in model.path",
    "tokenizer_mode": "engines and trainer use the one in model.path",
    "config_format": "the trainer follows config.json in model.path",
    "hf_config_path": "the trainer follows config.json in model.path",
    "hf_overrides": "the trainer follows config.json in model.path, and computes logits in float32",
    "quantization": "set rollout.quantization",
    "quantization_config": "set rollout.quantization",
    "enable_return_routed_experts": "set rollout.router_replay",
    "enable_sleep_mode": "set rollout.enable_sleep_mode",
    **dict.fromkeys(
        (
            "enable_lora",
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
            "lora_dtype",
            "lora_target_modules",
            "fully_sharded_loras",
            "default_mm_loras",
            "enable_tower_connector_lora",
            "enable_moe_shared_loras",
            "enable_mixed_moe_lora_format",
        ),
        OF_ADAPTERS,
    ),
    "tensor_parallel_size": "set rollout.tensor_parallel_size",
    "pipeline_parallel_size": "weights are pushed to workers that hold all layers",
    "data_parallel_size": "set rollout.data_parallel_size",
    "nnodes": SPANNING,
    "node_rank": SPANNING,
    "master_addr": SPANNING,
    "master_port": SPANNING,
    "seed": "each request has a seed of its own: set train.seed",
    "logits_processors": UNKNOWN_CHANGE,
    "watermark_config": UNKNOWN_CHANGE,
    "reasoning_config": "it ends reasoning that has a budget, and no request has one",
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), DRAFTS),
    "max_logprobs": "the trainer asks for the log-probability of the sampled token alone",
    "logprobs_mode": "the trainer needs log-probabilities after temperature",
    "generation_config": SAMPLED,
    "override_generation_config": SAMPLED,
    "weight_transfer_config": "weights are received over this project's own channels",
    "worker_extension_cls": "the workers need our extension, which checks every push",
    "linear_backend": "other backends reorder quantised weights, so that pushed ones would not fit",
    "moe_backend": "other backends reorder expert weights, so that pushed weights would not fit",
    "kernel_config": (
        "kernels of linear layers and experts are fixed; set rollout.vllm.ir_op_priority, "
        "enable_flashinfer_autotune or sparse_indexer_topk_backend"
    ),
    "enable_eplb": "experts would move between workers, but weights are pushed to fixed ones",
    "eplb_config": "experts do not move between workers",
    "expert_placement_strategy": "experts are pushed to workers in order",
    "kv_offloading_size": KEPT_ELSEWHERE,
    "kv_transfer_config": KEPT_ELSEWHERE,
    "offload_group_size": OFFLOADED,
    "cpu_offload_gb": OFFLOADED,
    "mm_processor_kwargs": "set max_pixels in preprocessor_config.json of model.path",
    "mm_device_do_normalize": "prompts with images are sent with the bytes of their pixels",
    "skip_tokenizer_init": "the trainer asks for the text of completions, too",
    "tokens_only": "the trainer asks for the text of completions, too",
    "max_num_queued_reqs": QUEUE,
    "max_num_queued_tokens": QUEUE,
    "disable_log_stats": "the trainer reads the token count to see that an engine makes progress",
    "scheduling_policy": "priorities keep batches reproducible",
}
"""Arguments that a config cannot set, and why: the trainer relies on another value, which a user's
would silently replace; requests override them, so that they would do nothing; or there is a key."""

OF_SERVER = {
    **dict.fromkeys(("chat_template", "trust_request_chat_template"), RENDERED),
    "default_chat_template_kwargs": "set data.chat_template_kwargs",
    "enable_auto_tool_choice": "set rollout.tool_call_parser",
    "tool_call_parser": "set rollout.tool_call_parser",
    "host": "engines of a run listen on the loopback interface; see `megatron-grpo serve --help`",
    "port": "the run chooses a free one; see `megatron-grpo serve --help`",
    "api_key": "every route requires MEGATRON_GRPO_TOKEN",
}
"""Arguments of vLLM's API server, in the same form."""
