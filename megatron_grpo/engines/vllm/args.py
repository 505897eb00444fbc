"""How a vLLM engine is started: its command line and environment.

Engines given by address must have been started in the same way.
"""

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.hf_config import (
    has_other_towers,
    may_have_linear_attention,
    read_scheme,
)
from checkpoint_convert.quantization import CONFIG_KEYS, engine_config
from checkpoint_convert.vllm_lora import adapted_modules, check_adapters_served, max_rank_for
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.arguments import (
    ONE_NODE,
    EngineNode,
    check_names,
    check_parser,
    command_flags,
    fields_of,
)
from megatron_grpo.engines.layouts import quantized_engine
from megatron_grpo.engines.push_protocol import VISION_VARIABLE
from megatron_grpo.engines.vllm.reserved import OF_SERVER, RESERVED
from megatron_grpo.policy.lora_targets import targets_of

DEQUANTIZED, QUANTIZED = "dequantized", "quantized_"
"""Our names in vLLM's registry of formats that weights are loaded from; a scheme's follows."""

WORKER_EXTENSION = "megatron_grpo.engines.vllm.worker.WorkerExtension"
"""Adds the method that the client calls to vLLM's workers."""

TOKEN_GUARD = "megatron_grpo.engines.access.TokenGuard"
"""Requires the token on every route; vLLM's own --api-key leaves most routes open."""

ENGINE_VARIABLE = "MEGATRON_GRPO_ENGINE"
"""Set in the environment of our engines; in any other process our plugin does nothing."""

DRAFTER_VARIABLE = "MEGATRON_GRPO_DRAFTER"
"""Set if pushes fill the layer that the engine drafts with, too."""

CPU_ATTENTION = "CPU_MLA"
"""The kernel of latent attention without a GPU, to be named for the model and for its drafter.
vLLM's default on CPUs with AMX packs a weight and deletes it, so that it could not be pushed."""

ADAPTER = "policy"
"""The name by which requests choose the adapter that is pushed."""
ADAPTER_ID = 1
"""Its number in vLLM."""

LIMIT = "limit_mm_per_prompt"

NO_ADAPTERS = LoraConfig()


def vllm_command(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    on_gpu: bool,
    node: EngineNode = ONE_NODE,
    lora: LoraConfig = NO_ADAPTERS,
) -> list[str]:
    """The command of one engine on `host`:`port`, or of a further `node` of it.

    Raises ValueError if it cannot do what the config asks for.
    """
    # -P: files of the working directory must not be imported instead of vLLM's own.
    command = [sys.executable, "-P", "-m"]
    flags = [f"--model={model.path}", *engine_flags(model, rollout, on_gpu, lora)]
    if node.nnodes > 1:
        flags += command_flags(asdict(node))
    if node.node_rank > 0:
        return [*command, "megatron_grpo.engines.vllm.headless", "--headless", *flags]
    command += ["vllm.entrypoints.openai.api_server"]
    command += [f"--host={host}", f"--port={port}", "--disable-uvicorn-access-log"]
    command += [f"--middleware={TOKEN_GUARD}"]
    # Scale-out adds the route with token ids in and out; load tracking counts accepted requests.
    command += ["--enable-scale-out", "--enable-server-load-tracking"]
    if parser := rollout.tool_call_parser:
        command += ["--enable-auto-tool-choice", f"--tool-call-parser={parser}"]
    return [*command, *flags]


def engine_flags(
    model: ModelConfig, rollout: RolloutConfig, on_gpu: bool, lora: LoraConfig = NO_ADAPTERS
) -> list[str]:
    """The flags that are the same on all nodes of an engine, but for the model's folder.

    Raises ValueError if vLLM cannot do what the config asks for.
    """
    if rollout.router_replay and not on_gpu:
        raise ValueError(
            "rollout.router_replay true: vLLM tells the experts of tokens only on GPUs: leave it "
            "out"
        )
    arguments: dict[str, Any] = {
        "dtype": model.dtype,
        # vLLM prefers Mistral's own files, which may lie beside those that the trainer reads.
        "config_format": "hf",
        "load_format": "hf",
        "tokenizer_mode": "hf",
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "data_parallel_size": rollout.data_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "scheduling_policy": "priority",
        "enable_return_routed_experts": rollout.router_replay or None,
        # Towers of images are loaded if prompts may have some, as `check_images` makes sure.
        "language_model_only": (has_other_towers(model.path) and LIMIT not in rollout.vllm) or None,
        # A CPU engine follows the same requests, but would not start with this.
        "enable_sleep_mode": (rollout.enable_sleep_mode and on_gpu) or None,
    }
    arguments |= platform_arguments(rollout.gpus_per_engine, on_gpu)
    if may_have_linear_attention(model.path):
        # What heads remember, as the trainer computes it; vLLM's default is the model's dtype.
        arguments["mamba_ssm_cache_dtype"] = "float32"
        # vLLM shares the memory of a prefix only where it may split prompts, and is not to on CPUs.
        arguments["enable_prefix_caching"] = None if on_gpu else False
    overrides = arguments.get("hf_overrides", {})
    if rollout.quantization != "none":
        arguments |= quantizing_arguments(model, rollout, overrides, on_gpu)
    elif read_scheme(model.path) is not None:
        arguments |= dequantizing_arguments(overrides, rollout.vllm)
    if lora.is_served:
        arguments |= adapter_arguments(model, lora, on_gpu)
    arguments |= rollout.vllm
    if not on_gpu and (drafts := rollout.vllm.get("speculative_config")):
        arguments["speculative_config"] = {"attention_backend": CPU_ATTENTION} | drafts
    return list(command_flags(arguments))


def adapter_arguments(model: ModelConfig, lora: LoraConfig, on_gpu: bool) -> dict[str, Any]:
    """What makes vLLM hold one adapter, on the modules that have one and on no others.

    Raises ValueError if vLLM cannot serve what the config asks for.
    """
    shape = read_shape(model.path)
    check_adapters(lora, shape)
    if on_gpu and model.dtype == "float32":
        raise ValueError(
            "model.dtype float32: vLLM's kernels for adapters on GPUs are for 16 bits: use "
            "model.dtype=bfloat16, or set lora.sync=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": max_rank_for(lora.r),
        "lora_target_modules": adapted_modules(shape, targets_of(lora, shape)),
    }


def check_adapters(lora: LoraConfig, shape: ModelShape) -> None:
    """Raise ValueError if engines are to serve adapters that vLLM would not, or not as trained."""
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
    """What makes vLLM build a quantised model as if it were not, and load what its weights mean.

    Layers with 8-bit weights could not take what is pushed. Raises ValueError if `rollout.vllm`,
    `table`, has another way to load than ours or none.
    """
    _check_load_format(table, "the 8-bit weights of model.path without their scales")
    return {
        "load_format": DEQUANTIZED,
        "hf_overrides": {**hf_overrides, **dict.fromkeys(CONFIG_KEYS)},
    }


def quantizing_arguments(
    model: ModelConfig, rollout: RolloutConfig, hf_overrides: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """What makes vLLM build the model quantised, and quantise what it loads as pushes are.

    Raises ValueError if it could not.
    """
    quantized = quantized_engine(rollout, read_shape(model.path), model.dtype)
    assert quantized is not None, "rollout.quantization is not none"
    _check_load_format(rollout.vllm, "weights of another dtype than engines have")
    config = dict.fromkeys(CONFIG_KEYS) | {CONFIG_KEYS[0]: engine_config(quantized.config)}
    arguments = {
        "load_format": QUANTIZED + rollout.quantization,
        "hf_overrides": {**hf_overrides, **config},
    }
    # Other kernels for GPUs rearrange weights or scales, or round these to powers of 2.
    return arguments | ({"linear_backend": "cutlass"} if on_gpu else {})


def _check_load_format(table: Mapping[str, Any], what: str) -> None:
    chosen = table.get("load_format", "dummy")
    if chosen != "dummy":
        raise ValueError(
            f"rollout.vllm.load_format {chosen} would load {what}: leave it out, or set it to dummy"
        )


def platform_arguments(num_workers: int, on_gpu: bool) -> dict[str, Any]:
    """Engine arguments that differ between CPU and GPU."""
    if on_gpu:
        return {
            # The only backend that, on every GPU, keeps weights of experts and their scales as they
            # were loaded, which those that are pushed later need. As it is named, vLLM does not
            # look for DeepGEMM, which rounds scales to powers of 2 (its fused_moe/oracle/fp8.py).
            "moe_backend": "triton",
            # The trainer does not round logits to 16 bits either. vLLM for CPUs would convert the
            # whole head in every step.
            "hf_overrides": {"head_dtype": "float32"},
        }
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
    """Variables that an engine needs in addition to the user's environment."""
    fills_drafter = model.mtp_num_layers and rollout.drafts_with_mtp
    return {
        ENGINE_VARIABLE: "1",
        **({} if model.freeze_vision else {VISION_VARIABLE: "1"}),
        **({DRAFTER_VARIABLE: "1"} if fills_drafter else {}),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause the engine and update its weights
        **server_environment(rollout.gpus_per_engine, on_gpu),
    }


def server_environment(num_workers: int, on_gpu: bool) -> dict[str, str]:
    """Variables that any vLLM of a run needs, be it an engine or that of a reward model."""
    environment = {
        "VLLM_API_KEY": "",  # a key of the user's would lock us out of the routes that it guards
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # nothing that arrives by HTTP is unpickled
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder: no requests to the hub
    }
    if on_gpu:
        return environment
    return environment | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM for CPU overrides the executor `uni` unless this is off; the API server is a separate
        # process all the same.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if num_workers == 1 else "1",
    }


def check_engine_arguments(table: Mapping[str, Any], parser: str | None = None) -> None:
    """Raise ValueError for a name in `rollout.vllm` that is reserved or that vLLM does not know, a
    parser that it does not have, or if it or what it needs for images is not installed."""
    known = engine_argument_names()  # also without any name: it says if vLLM is missing
    check_names("vllm", table, RESERVED | OF_SERVER, known, "`vllm serve --help` has all")
    if LIMIT in table and importlib.util.find_spec("torchvision") is None:
        raise ValueError(
            f"rollout.vllm.{LIMIT}: vLLM needs torchvision for images, which is not installed: "
            "install the release for the installed torch, with `pip install --no-deps torchvision`"
        )
    check_parser("vLLM", parser, tool_call_parsers())


@cache
def engine_argument_names() -> frozenset[str]:
    """The fields of the installed vLLM's EngineArgs.

    Read from its source in a tenth of a second, as importing it takes many seconds. Raises
    ValueError when vLLM is not installed.
    """
    return fields_of(_installed() / "engine" / "arg_utils.py", ENGINE_CLASSES)


def tool_call_parsers() -> frozenset[str]:
    """The names of the installed vLLM's parsers of calls of tools, read from its source."""
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
