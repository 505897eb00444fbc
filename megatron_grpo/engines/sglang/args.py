"""How an SGLang engine is started: its command line and environment."""

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.folder import read_json
from checkpoint_convert.hf_config import has_other_towers, read_scheme
from checkpoint_convert.quantized.scheme import CONFIG_KEYS, engine_config
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
from megatron_grpo.engines.sglang.variables import QUANTIZATION_VARIABLE, check_variables
from megatron_grpo.launch.process import answer_of

SERVER = "megatron_grpo.engines.sglang.server"
LIMIT = "limit_mm_data_per_request"
"""Argument for prompts with images: the engine serves the whole of a multimodal model."""
PARSERS = Path("function_call", "function_call_parser.py")
"""File of SGLang's runtime that lists its parsers of tool calls."""

ROOMS = "follow_bootstrap_room"
"""SGLang's load balancing by rooms, which only its router for separate prefill engines sets."""

NEEDED = {
    "sampling_defaults": "openai",
    "skip_server_warmup": True,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "disable_priority_preemption": True,
    # Otherwise SGLang appends the shared expert to the stack of experts.
    "disable_shared_experts_fusion": True,
    # Requests bring pixels, in host memory.
    "mm_feature_transport": "cpu",
    # Interpolates position embeddings as transformers does, in CUDA graphs of towers, too.
    "enable_precise_embedding_interpolation": True,
}
"""Arguments that our server adds in every engine."""


_PUSHED = "weights are pushed to workers that hold all layers, each split over all of them"
_CHANGED = "the trainer would not know how it changes the distribution"
REFUSED = {
    "model_path": "set model.path",
    "tokenizer_(path|mode)": "engines and trainer use the one in model.path",
    "skip_tokenizer_init": "the trainer asks for the text of completions, too",
    "revision": "model.path is a folder, which has no revisions",
    "json_model_override_args|decrypted_config_file": "the trainer follows config.json in "
    "model.path",
    "enable_return_routed_experts": "set rollout.router_replay",
    "enable_return_indexer_topk": "set rollout.indexer_replay",
    "enable_memory_saver": "set rollout.enable_sleep_mode",
    "tp_size": "set rollout.tensor_parallel_size",
    "(pp|dwdp|attn_cp|moe_dp|moe_dense_tp)_size|enable_prefill_cp": _PUSHED,
    "moe_a2a_backend|disaggregation_mode": _PUSHED,
    "(attn_)?dp_size|enable_dp_attention": "set rollout.data_parallel_size",
    "enable_tp_lm_head_all_to_all": "each group of workers has the whole head",
    "enable_dp_attention_local_control_broadcast": "groups are paused for a push at the same time",
    "(admin_)?api_key": "every route requires MEGATRON_GRPO_TOKEN",
    "grpc_port|(smg_)?grpc_mode": "calls by gRPC would need no token",
    "weight_version": "it tells which push sampled a token",
    "weight_cache_mode": "pushes would change weights that other processes have",
    "delete_ckpt_after_loading": "ranks and further engines read model.path, too",
    "custom_weight_loader": "weights are received over this project's own channels",
    "tokenizer_worker_num": "one process holds requests back during a push",
    "enable_eplb|ep_num_redundant_experts|init_expert_location": "experts would move between "
    "workers, but weights are pushed to fixed ones",
    "fp8_gemm_runner_backend": "others may round scales to powers of 2: pushed ones would not fit",
    "enforce_shared_experts_fusion": "shared experts are pushed apart from the others",
    "enable_lora|lora_(paths|target_modules)|max_lora_rank": "set lora.sync=merged",
    "speculative_(algorithm|draft_model_path|num_steps|num_draft_tokens|eagle_topk)": "the weights "
    "of a draft model are not pushed",
    "enable_(hierarchical_cache|lmcache|flexkv|unified_cache_external_linker)": "keys and values "
    "outside the cache would outlive a push",
    "dcp_(size|replicate_q_proj)": "copies of query weights would outlive a push",
    "enable_(custom_logit_processor|strict_thinking)|dllm_algorithm": _CHANGED,
    "preferred_sampling_params|(enable_)?watermark.*": _CHANGED,
    "priority_scheduling_preemption_threshold": "completions that are begun are not thrown away",
    "cpu_offload_gb|offload_group_size": "pushed weights stay on the GPU",
    "modelopt_quant|quantize_and_serve|rl_quant_profile": "set rollout.quantization",
    "enable_multimodal|encoder_only|language_(model_)?only": "it follows data.image_column",
    "enable_mm_global_cache": "features of images outside the engine would outlive a push",
    "max_queued_requests": "an engine gets all requests of a generation at once",
    "allow_auto_truncate": "the trainer would not know what was left out",
    "incremental_streaming_output": "answers are read as SGLang's cumulative ones",
    "(trust_request_)?chat_template|completion_template|hf_chat_template_name": "the trainer "
    "renders prompts, by chat_template.jinja in model.path",
    "default_chat_template_kwargs": "set data.chat_template_kwargs",
}
"""Regular expressions for arguments that a config cannot set, and why. `own_arguments` and NEEDED
are refused as well."""


def sglang_command(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    on_gpu: bool,
    node: EngineNode = ONE_NODE,
) -> list[str]:
    """Command line of an engine on `host`:`port`, or of a further `node` of it; ValueError if
    SGLang cannot do what the config asks for."""
    check_folder_loaded(model, rollout)
    shape = read_shape(model.path)
    overrides = _config_overrides(shape)
    if rollout.quantization != "none":
        quantized = quantized_engine(rollout, shape, model.dtype)
        assert quantized is not None, "rollout.quantization is not none"
        # SGLang builds a quantised model, and `read_weights` quantises the folder's weights.
        overrides |= {CONFIG_KEYS[0]: engine_config(quantized.config)}
    arguments: dict[str, Any] = {"model_path": model.path, "log_level_http": "warning"}
    arguments |= _platform_arguments(on_gpu) | _attention_arguments(shape, on_gpu) | rollout.sglang
    arguments |= own_arguments(model.dtype, rollout, overrides, on_gpu)
    arguments |= {"host": host, "port": port} | _node_arguments(node)
    # -P: files of the working directory must not be imported instead of SGLang's own.
    command = [str(rollout.python or sys.executable), "-P", "-m", SERVER]
    # Most of SGLang's switches have no --no- form: False is left out.
    return [*command, *command_flags({k: None if v is False else v for k, v in arguments.items()})]


def own_arguments(
    dtype: str, rollout: RolloutConfig, overrides: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of every engine that configs cannot set; None is SGLang's default."""
    has_groups, is_quantized = rollout.data_parallel_size > 1, rollout.quantization != "none"
    return {
        "dtype": dtype,
        "device": None if on_gpu else "cpu",
        "json_model_override_args": {**overrides} or None,
        "tp_size": rollout.gpus_per_engine,
        # Each group of workers has the whole head, as it has the whole embedding.
        "attn_dp_size": rollout.data_parallel_size if has_groups else None,
        "enable_dp_lm_head": has_groups or None,
        "tool_call_parser": rollout.tool_call_parser,
        "enable_return_routed_experts": rollout.router_replay or None,
        "enable_return_indexer_topk": rollout.indexer_replay or None,
        # An engine on CPUs accepts requests to sleep, and keeps its memory.
        "enable_memory_saver": (rollout.enable_sleep_mode and on_gpu) or None,
        # Keeps experts as loaded, so that pushed ones fit.
        "moe_runner_backend": "triton" if on_gpu else None,
        # Keeps weights and scales as loaded on any card with units for FP8 (see
        # dispatch_w8a8_block_fp8_linear in its fp8_utils.py); the default may be DeepGEMM.
        "fp8_gemm_backend": "triton" if on_gpu and is_quantized else None,
    }


def is_plain(model: Path) -> bool:
    """Whether a folder has a text tower alone, and no quantised weights."""
    return not has_other_towers(model) and read_scheme(model) is None


def check_folder_loaded(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if an engine cannot load the folder, or not in `model.dtype`."""
    config = read_json(path := model.path / "config.json")
    family, stored = config.get("model_type"), config.get("dtype") or config.get("torch_dtype")
    chosen = rollout.sglang.get("load_format")
    converted = {
        f"rollout.quantization {rollout.quantization}": rollout.quantization != "none",
        f"towers or quantised weights in {model.path}": chosen != "dummy"
        and not is_plain(model.path),
    }
    if chosen and (kinds := [key for key, is_so in converted.items() if is_so]):
        raise ValueError(
            f"rollout.sglang.load_format {chosen} does not go with {kinds[0]}, as engines convert "
            "what they load: leave it out"
        )
    follows = family in FAMILIES and FAMILIES[family].engines.sglang.follows_stored_dtype
    if follows and stored not in (None, model.dtype):
        raise ValueError(
            f"{path}: dtype is {stored}, in which SGLang makes some layers of a {family} whatever "
            f"model.dtype is: set model.dtype={stored}, or convert the model to {model.dtype} with "
            "checkpoint-convert, or use rollout.engine=vllm"
        )


def _config_overrides(shape: ModelShape) -> dict[str, Any]:
    """Values of config.json that SGLang reads under other keys than those of transformers 5.

    With latent attention: frequency of expert layers, and sizes of indexers, without which
    attention would be dense. Otherwise RoPE (OLMo-3, linear attention), YaRN's factor, and the
    interval of full attention.
    """
    if shape.latent is not None:
        found: dict[str, Any] = {"moe_layer_freq": 1}  # no family here has another value
        if indexer := shape.indexer:
            found |= {"index_topk": indexer.topk, "index_n_heads": indexer.num_heads}
            found["index_head_dim"] = indexer.head_dim
        return found
    rope = _yarn_factor(shape)
    if not FAMILIES[shape.family].engines.sglang.has_one_rope and shape.linear is None:
        return {"rope_parameters": rope} if rope else {}
    rope = {"rope_type": "default", **(shape.rope_scaling or {}), **rope}
    found = {
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, **rope},
    }
    return found | ({"full_attention_interval": full_interval(shape)} if shape.linear else {})


def _yarn_factor(shape: ModelShape) -> dict[str, Any]:
    """YaRN's attention factor by SGLang's keys: divided by the paper's, 0.1 ln(factor) + 1."""
    rope = shape.rope_scaling
    if rope is None or shape.rope_type != "yarn":
        return {}
    own = 1 + 0.1 * log(max(rope["factor"], 1.0))
    return {"attn_factor": rope["attention_factor"] / own, "mscale": None, "mscale_all_dim": None}


def full_interval(shape: ModelShape) -> int | None:
    """Interval n if exactly the layers n - 1, 2n - 1, ... have full attention; else None."""
    layers, linear = range(shape.num_layers), {*shape.linear_layers}
    interval = next((each for each in layers if each not in linear), shape.num_layers) + 1
    return interval if linear == {each for each in layers if (each + 1) % interval} else None


def _node_arguments(node: EngineNode) -> dict[str, Any]:
    """Arguments for the rendezvous of several nodes; empty for one node."""
    if node.nnodes == 1:
        return {}
    address = f"[{node.master_addr}]" if ":" in node.master_addr else node.master_addr
    return {
        "nnodes": node.nnodes,
        "node_rank": node.node_rank,
        "dist_init_addr": f"{address}:{node.master_port}",
    }


def _platform_arguments(on_gpu: bool) -> dict[str, Any]:
    if on_gpu:  # the trainer does not round logits to 16 bits either
        return {"enable_fp32_lm_head": True}
    return {
        "attention_backend": "torch_native",  # the others need kernels that no package brings
        "max_total_tokens": 1 << 16,  # the default is a share of the machine's memory
        "sleep_on_idle": True,  # else the scheduler spins
        "boundary_reduction": "ar",  # the others call NCCL
    }


def _attention_arguments(shape: ModelShape, on_gpu: bool) -> dict[str, Any]:
    """Arguments for sinks, linear and sparse attention."""
    if shape.linear is not None:  # recurrent states in the trainer's dtype
        return {"mamba_ssm_dtype": "float32"}
    if shape.indexer is not None:  # the default of some cards is 8 bits
        return {"kv_cache_dtype": "bfloat16"}
    if not shape.has_sinks:
        return {}
    if on_gpu:  # the default of some cards, trtllm_mha, keeps sinks in float32
        return {"attention_backend": "triton"}
    # SGLang requires a backend with sinks to be named. Without kernels for this one, it falls back
    # to torch_native, which is ours and reads the cache of all layers alike.
    return {"attention_backend": "intel_amx", "disable_hybrid_swa_memory": True}


def sglang_environment(model: ModelConfig, rollout: RolloutConfig, on_gpu: bool) -> dict[str, str]:
    """Variables of an engine, added to the user's environment."""
    environment = {
        "HF_HUB_OFFLINE": "1",  # the model is a local folder: no requests to the hub
        QUANTIZATION_VARIABLE: rollout.quantization,
        **({} if model.freeze_vision else {VISION_VARIABLE: "1"}),
        # Else the engine reports chosen tokens by their slots in the cache.
        **({"SGLANG_DSA_FUSE_TOPK": "0"} if rollout.indexer_replay else {}),
    }
    if on_gpu:
        return environment
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    num_workers = rollout.gpus_per_engine
    if num_workers > 1:
        # Else SGLang wants a NUMA node for each worker, and loads the NCCL of torch's GPU builds.
        cores = sorted(os.sched_getaffinity(0))
        bound = [str(cores[number % len(cores)]) for number in range(num_workers)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        environment["SGLANG_NCCL_SO_PATH"] = "none"
    return environment


def check_sglang_arguments(rollout: RolloutConfig) -> None:
    """Raise ValueError for a reserved or unknown name in `rollout.sglang`, an unknown parser, a
    refused variable, or if SGLang is not installed."""
    python = str(rollout.python or sys.executable)
    help_text = "`python -m sglang.launch_server --help` has all"
    own = (
        own_arguments("", rollout, {}, on_gpu=True)
        | _node_arguments(EngineNode(2, 0, "", 0))
        | NEEDED
    )
    known = sglang_argument_names(python)
    check_names("sglang", rollout.sglang, REFUSED, {"host", "port", *own}, known, help_text)
    check_parser("SGLang", rollout.tool_call_parser, tool_call_parsers(python))
    if (method := rollout.sglang.get("load_balance_method")) == ROOMS:
        raise ValueError(
            f"rollout.sglang.load_balance_method {method} needs a router that names a room with "
            "each request, and ends an engine of several groups at one without: leave it out, or "
            "use round_robin, total_requests or total_tokens"
        )
    check_variables(os.environ)


def sglang_argument_names(python: str) -> frozenset[str]:
    """Fields of the installed ServerArgs; ValueError if SGLang is not installed."""
    files = (_installed(python) / "arg_groups" / "fields").glob("*.py")
    return frozenset[str]().union(*map(fields_of, files))


def tool_call_parsers(python: str) -> frozenset[str]:
    source = (_installed(python) / PARSERS).read_text(encoding="utf-8")
    return frozenset(re.findall(r'^        "(\S+)": \w+Detector,', source, re.MULTILINE))


@cache
def _installed(python: str) -> Path:
    """Folder of SGLang's runtime for the interpreter `python`; ValueError if there is none."""
    find = (
        "from importlib.util import find_spec as f; s = f('sglang'); print(s.origin if s else '')"
    )
    origin = answer_of(Path(python), find)
    folder = Path(origin).parent / "srt"
    read = (folder / "arg_groups" / "fields", folder / PARSERS)
    if not origin or not all(path.exists() for path in read):
        raise ValueError(
            f"SGLang 0.5.23 is not installed for {python}: run `make setup-sglang` (with GPUs "
            "`make setup-sglang-gpu`) and set rollout.python=.venv-sglang/bin/python"
        )
    return folder
