"""How a vLLM engine is started: its command line and environment.

Engines given by address must have been started in the same way.
"""

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.families.ffn import ROUTER
from checkpoint_convert.hf_config import has_other_towers, may_have_linear_attention, read_scheme
from checkpoint_convert.hf_folder import locate_tensors
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, engine_config
from checkpoint_convert.vllm import engine_parameters
from checkpoint_convert.vllm_lora import adapted_modules, check_adapters_served, max_rank_for
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engine_weights.layouts import quantized_engine
from megatron_grpo.engine_weights.protocol import VISION_VARIABLE
from megatron_grpo.engines.arguments import (
    ONE_NODE,
    EngineNode,
    check_names,
    check_parser,
    command_flags,
    fields_of,
)
from megatron_grpo.policy.lora_targets import targets_of

DEQUANTIZED, QUANTIZED = "dequantized", "quantized_"
"""Our load formats in vLLM's registry, such as quantized_fp8: the prefix, and a scheme."""

WORKER_EXTENSION = "megatron_grpo.engines.vllm.worker.WorkerExtension"
"""Mixin of vLLM's workers, with the method that the client calls."""

TOKEN_GUARD = "megatron_grpo.engines.access.TokenGuard"
"""Requires the token on every route; vLLM's own --api-key leaves most routes open."""

ENGINE_VARIABLE = "MEGATRON_GRPO_ENGINE"
"""Set in the environment of our engines; in any other process our plugin does nothing."""

DRAFTER_VARIABLE = "MEGATRON_GRPO_DRAFTER"
"""Set if pushes fill the engine's drafting layer, too."""

CPU_ATTENTION = "CPU_MLA"
"""The kernel of latent attention without a GPU, for the model and its drafter. vLLM's default on
CPUs with AMX packs a weight and deletes the original, which pushes fill."""

ADAPTER = "policy"
"""Name of the pushed adapter in requests."""
ADAPTER_ID = 1
"""Number of the adapter in vLLM."""

LIMIT = "limit_mm_per_prompt"

NO_ADAPTERS = LoraConfig()

SMALL_CARD, LARGE_CARD = 256, 1024
"""vLLM's defaults of `max_num_seqs` on GPUs of less than 70 GiB and A100s, and on larger ones (its
`EngineArgs.get_batch_defaults`)."""


REFUSED = {
    "model|model_weights": "set model.path",
    "revision|code_revision|tokenizer_revision": "model.path is a folder, which has no revisions",
    "tokenizer|tokenizer_mode": "engines and trainer use the one in model.path",
    "hf_config_path|hf_overrides|config_format": "the trainer follows config.json in model.path",
    "quantization_config": "set rollout.quantization",
    "enable_return_routed_experts": "set rollout.router_replay",
    ".*lora.*": "engines hold one adapter, in the form that is pushed: see the section lora",
    "pipeline_parallel_size": "weights are pushed to workers that hold all layers",
    "seed": "each request has a seed of its own: set train.seed",
    "logits_processors|watermark_config": "the trainer would not know how they change the "
    "distribution",
    "reasoning_config": "it ends reasoning that has a budget, and no request has one",
    "spec_(method|model|tokens)": "set rollout.vllm.speculative_config",
    "max_logprobs": "the trainer asks for the log-probability of the sampled token alone",
    "(override_)?generation_config": "sampling follows rollout.temperature, "
    "rollout.max_completion_length and rollout.stop_token_ids, not the model's own defaults",
    "weight_transfer_config": "weights are received over this project's own channels",
    "(linear|moe)_backend|kernel_config": "kernels of linear layers and experts are fixed; set "
    "rollout.vllm.ir_op_priority, enable_flashinfer_autotune or sparse_indexer_topk_backend",
    "enable_eplb|eplb_config|expert_placement_strategy": "experts are pushed to workers in order, "
    "and would move between them",
    "kv_offloading_size|kv_transfer_config": "keys and values outside the GPU's cache would "
    "outlive a push of new weights",
    "offload_group_size|cpu_offload_gb": "weights in host memory would replace those that were "
    "pushed; use more GPUs per engine",
    "mm_processor_kwargs": "set max_pixels in preprocessor_config.json of model.path",
    "mm_device_do_normalize": "prompts with images are sent with the bytes of their pixels",
    "skip_tokenizer_init|tokens_only": "the trainer asks for the text of completions, too",
    "max_num_queued_(reqs|tokens)": "an engine gets all requests of a generation at once",
    "disable_log_stats": "the trainer reads the token count to see that an engine makes progress",
    # Of the API server:
    "(trust_request_)?chat_template": "the trainer renders prompts, by chat_template.jinja in "
    "model.path",
    "default_chat_template_kwargs": "set data.chat_template_kwargs",
    "api_key": "every route requires MEGATRON_GRPO_TOKEN",
}
"""Regular expressions for arguments that requests override, or that would silently break what the
trainer relies on, and why. `own_arguments` and `server_arguments` are refused as well."""


def vllm_command(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    on_gpu: bool,
    node: EngineNode = ONE_NODE,
    lora: LoraConfig = NO_ADAPTERS,
    num_completions: int = 0,
) -> list[str]:
    """Command line of an engine on `host`:`port`, or of a further `node` of it, that gets at most
    `num_completions` at once; ValueError if vLLM cannot do what the config asks for."""
    # -P: files of the working directory must not be imported instead of vLLM's own.
    command = [sys.executable, "-P", "-m"]
    flags = engine_flags(model, rollout, on_gpu, lora, num_completions)
    flags = [f"--model={model.path}", *flags]
    if node.nnodes > 1:
        flags += command_flags(asdict(node))
    if node.node_rank > 0:
        return [*command, "megatron_grpo.engines.vllm.headless", "--headless", *flags]
    server = command_flags(server_arguments(host, port, rollout.tool_call_parser))
    return [*command, "vllm.entrypoints.openai.api_server", *server, *flags]


def server_arguments(host: str, port: int, tool_call_parser: str | None) -> dict[str, Any]:
    """Arguments of the API server that configs cannot set."""
    return {
        "host": host,
        "port": port,
        "disable_uvicorn_access_log": True,
        "middleware": TOKEN_GUARD,
        # For /inference/v1/generate, with token ids in and out.
        "enable_scale_out": True,
        # For /load, which counts accepted requests.
        "enable_server_load_tracking": True,
        "enable_auto_tool_choice": tool_call_parser and True,
        "tool_call_parser": tool_call_parser,
    }


def own_arguments(
    dtype: str, rollout: RolloutConfig, hf_overrides: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of every engine that configs cannot set; None is vLLM's default."""
    return {
        "dtype": dtype,
        "hf_overrides": {**hf_overrides} or None,
        # vLLM prefers files in Mistral's format; the trainer reads files in the Hugging Face
        # format.
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "data_parallel_size": rollout.data_parallel_size,
        # After the temperature, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        # In order of the requests' priorities: batches are reproducible.
        "scheduling_policy": "priority",
        "enable_return_routed_experts": rollout.router_replay or None,
        # vLLM on CPUs accepts requests to sleep, but does not start with this flag.
        "enable_sleep_mode": (rollout.enable_sleep_mode and on_gpu) or None,
        # The only backend that keeps experts and their scales as loaded on every GPU, so that
        # pushed ones fit. Naming it also keeps vLLM from choosing DeepGEMM, which rounds scales to
        # powers of 2 (its fused_moe/oracle/fp8.py).
        "moe_backend": "triton" if on_gpu else None,
        # Other backends rearrange quantised weights or scales, or round scales to powers of 2.
        "linear_backend": "cutlass" if on_gpu and rollout.quantization != "none" else None,
    }


def engine_flags(
    model: ModelConfig,
    rollout: RolloutConfig,
    on_gpu: bool,
    lora: LoraConfig = NO_ADAPTERS,
    num_completions: int = 0,
) -> list[str]:
    """Flags of all nodes of an engine, without the model's folder; ValueError if vLLM cannot do
    what the config asks for."""
    if rollout.router_replay and not on_gpu:
        raise ValueError(
            "rollout.router_replay true: vLLM returns the experts of tokens only on GPUs: leave it "
            "out"
        )
    arguments: dict[str, Any] = {
        "load_format": "hf",
        # The trainer does not round logits to 16 bits either. On CPUs, vLLM would convert the whole
        # head in every step.
        "hf_overrides": {"head_dtype": "float32"} if on_gpu else {},
        # Towers of images are loaded only if prompts may have images (see `check_images`).
        "language_model_only": (has_other_towers(model.path) and LIMIT not in rollout.vllm) or None,
    }
    if not on_gpu:
        arguments |= cpu_arguments(rollout.gpus_per_engine)
    if may_have_linear_attention(model.path):
        # Recurrent states in the trainer's dtype; vLLM's default is the model's.
        arguments["mamba_ssm_cache_dtype"] = "float32"
        # vLLM caches prefixes of such models only with chunked prefill, which is off on CPUs.
        arguments["enable_prefix_caching"] = None if on_gpu else False
    elif (
        on_gpu
        and num_completions > SMALL_CARD * rollout.data_parallel_size
        and "max_num_batched_tokens" not in rollout.vllm  # vLLM refuses a lower one
    ):
        # Else completions would queue on a small card. Not above: vLLM does not start with more
        # sequences than the cache has blocks for their recurrent states.
        arguments["max_num_seqs"] = LARGE_CARD
    if rollout.quantization != "none":
        arguments |= quantizing_arguments(model, rollout, arguments["hf_overrides"])
    elif read_scheme(model.path) is not None:
        arguments |= dequantizing_arguments(arguments["hf_overrides"], rollout.vllm)
    if lora.is_served:
        arguments |= adapter_arguments(model, lora, on_gpu)
    own = own_arguments(model.dtype, rollout, arguments["hf_overrides"], on_gpu)
    arguments |= {**rollout.vllm, **own}
    if not on_gpu and (drafts := rollout.vllm.get("speculative_config")):
        arguments["speculative_config"] = {"attention_backend": CPU_ATTENTION} | drafts
    return list(command_flags(arguments))


def adapter_arguments(model: ModelConfig, lora: LoraConfig, on_gpu: bool) -> dict[str, Any]:
    """Arguments for one adapter in vLLM, on its own modules alone; ValueError if vLLM cannot serve
    it."""
    shape = read_shape(model.path)
    check_adapters(lora, shape)
    if on_gpu and model.dtype == "float32":
        raise ValueError(
            "model.dtype float32: vLLM's kernels for adapters on GPUs are for 16 bits: use "
            "model.dtype=bfloat16, or set lora.sync=merged"
        )
    # vLLM holds these in float32, and loads every bit of the folder; ranks have rounded theirs.
    routers = [
        each.sources[0].name
        for each in engine_parameters(shape)
        if each.name == ROUTER and each.vllm.is_float32
    ]
    places = locate_tensors(model.path, routers)
    if model.dtype != "float32" and any(places[name].dtype == "F32" for name in routers):
        raise ValueError(
            f"model.dtype {model.dtype}: {model.path} has routers in float32, and engines with "
            "adapters would route by other values than ranks: set lora.sync=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": max_rank_for(lora.r),
        "lora_target_modules": adapted_modules(shape, targets_of(lora, shape)),
    }


def check_adapters(lora: LoraConfig, shape: ModelShape) -> None:
    """Raise ValueError for adapters that vLLM would not serve, or not as trained."""
    if not lora.is_served:
        return
    try:
        check_adapters_served(shape)
        max_rank_for(lora.r)
    except ValueError as error:
        raise ValueError(f"lora.sync adapter: {error}: set lora.sync=merged") from None


def dequantizing_arguments(
    hf_overrides: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments to build a quantised model unquantised, as pushes are, and to dequantise what is
    loaded; ValueError if `table` (`rollout.vllm`) sets another `load_format`."""
    _check_load_format(table, "the 8-bit weights of model.path without their scales")
    return {
        "load_format": DEQUANTIZED,
        "hf_overrides": {**hf_overrides, **dict.fromkeys(CONFIG_KEYS)},
    }


def quantizing_arguments(
    model: ModelConfig, rollout: RolloutConfig, hf_overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments to build the model quantised, and to quantise its folder as pushes are; ValueError
    if vLLM cannot."""
    shape = read_shape(model.path)
    shape = replace(shape, trains_mtp=shape.can_train_mtp)  # whoever trains the drafter
    quantized = quantized_engine(rollout, shape, model.dtype)
    assert quantized is not None, "rollout.quantization is not none"
    _check_load_format(rollout.vllm, "weights of another dtype than engines have")
    config = dict.fromkeys(CONFIG_KEYS) | {CONFIG_KEYS[0]: engine_config(quantized.config)}
    return {
        "load_format": QUANTIZED + rollout.quantization,
        "hf_overrides": {**hf_overrides, **config},
    }


def _check_load_format(table: Mapping[str, Any], what: str) -> None:
    chosen = table.get("load_format", "dummy")
    if chosen != "dummy":
        raise ValueError(
            f"rollout.vllm.load_format {chosen} would load {what}: leave it out, or set it to dummy"
        )


def cpu_arguments(num_workers: int) -> dict[str, Any]:
    """Defaults for any vLLM of a run without a GPU."""
    return {
        "enforce_eager": True,
        # With the default of 128, prefixes shorter than that are not shared.
        "block_size": 32,
        "attention_backend": CPU_ATTENTION,
        # The default is 92% of the machine's memory.
        "kv_cache_memory_bytes": 2**30,
        # A seeded request whose prompt is split into chunks crashes the engine: vLLM rewinds its
        # generator by an offset, which CPU generators do not support.
        "enable_chunked_prefill": False,
        # One process fewer to start (12 s instead of 25 s) and to talk to.
        "distributed_executor_backend": "uni" if num_workers == 1 else "mp",
    }


def vllm_environment(model: ModelConfig, rollout: RolloutConfig, on_gpu: bool) -> dict[str, str]:
    """Variables of an engine, added to the user's environment."""
    fills_drafter = model.mtp_num_layers and rollout.drafts_with_mtp
    return {
        ENGINE_VARIABLE: "1",
        **({} if model.freeze_vision else {VISION_VARIABLE: "1"}),
        **({DRAFTER_VARIABLE: "1"} if fills_drafter else {}),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause the engine and update its weights
        **server_environment(rollout.gpus_per_engine, on_gpu),
    }


def server_environment(num_workers: int, on_gpu: bool) -> dict[str, str]:
    """Variables of any vLLM of a run: an engine, or a reward model's server."""
    environment = {
        "VLLM_API_KEY": "",  # the user's key would lock us out of the routes that vLLM guards
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # nothing that arrives by HTTP is unpickled
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder: no requests to the hub
    }
    if on_gpu:
        return environment
    return environment | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM for CPUs overrides the executor `uni` unless this is off; the API server stays a
        # process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if num_workers == 1 else "1",
    }


def check_engine_arguments(table: Mapping[str, Any], parser: str | None = None) -> None:
    """Raise ValueError for a reserved or unknown name in `rollout.vllm`, an unknown parser, or if
    vLLM, or torchvision for images, is not installed."""
    known = engine_argument_names()  # even for an empty table: it raises if vLLM is missing
    own = own_arguments("", RolloutConfig(max_completion_length=1), {}, on_gpu=True)
    own |= server_arguments("", 0, None) | asdict(ONE_NODE)
    check_names("vllm", table, REFUSED, own, known, "`vllm serve --help` has all")
    if LIMIT in table and importlib.util.find_spec("torchvision") is None:
        raise ValueError(
            f"rollout.vllm.{LIMIT}: vLLM needs torchvision for images, which is not installed: "
            "install the release for the installed torch, with `pip install --no-deps torchvision`"
        )
    check_parser("vLLM", parser, tool_call_parsers())


@cache
def engine_argument_names() -> frozenset[str]:
    """Fields of EngineArgs, read from its source: imports take seconds. ValueError without vLLM."""
    return fields_of(_installed() / "engine" / "arg_utils.py", ENGINE_CLASSES)


def tool_call_parsers() -> frozenset[str]:
    source = (_installed() / "tool_parsers" / "__init__.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE))


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError(
            "rollout.engine vllm is not installed: run `make setup` (on GPUs: `bash "
            "requirements/gpu.sh`)"
        )
    return Path(spec.origin).parent


ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
