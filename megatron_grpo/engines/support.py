"""Whether an engine can serve a model: at all, on this machine, and with its drafts."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from math import prod
from typing import Any

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import WITH_IMAGES
from checkpoint_convert.folder import read_json
from checkpoint_convert.hf_config import has_other_towers, read_scheme
from checkpoint_convert.hf_folder import locate_tensors, mtp_tensors
from checkpoint_convert.quantized.scheme import quantization_table
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.arguments import engine_number, engine_table, reason
from megatron_grpo.engines.sglang.args import LIMIT, full_interval

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32 has an attention kernel for CPUs."""
CPU_KERNELS = "megatron_grpo.cpu_kernels"
"""Entry-point group of engine plugins that bring other kernels for CPUs."""
WITH_FP8 = (8, 9)
"""Least compute capability of GPUs with units for FP8."""
WITH_SPARSE = (9, 0)
"""Least compute capability for sparse attention in vLLM and SGLang."""
WITH_ROUTERS_OF_16_BITS = (9, 10)
"""Major compute capabilities on which vLLM 0.32 keeps routers of Nemotron-H in the model's dtype;
on others they are in float32."""
SGLANG_INDEXER = {"index_head_dim": 128, "index_topk": 2048}
"""The only indexers of SGLang 0.5.23: its cache has keys of 128 elements, its kernels for prompts
assert 2,048 chosen tokens, and shorter prompts get dense attention."""
SGLANG_SPARSE = {
    "(|prefill_|decode_)attention_backend": "SGLang chooses `dsa` only if it is left out",
    # SGLang would exit at its start.
    "enable_deterministic_inference|rl_on_policy_target": "SGLang's `dsa` has no such kernels: "
    "leave it out",
}
"""Arguments that do not go with sparse attention, and why."""


def num_gpus() -> int:
    import torch  # takes seconds, and checks of config do not need it

    return torch.cuda.device_count()


def _refuse(reasons: Mapping[str, object]) -> None:
    """Raise ValueError with the first message whose condition holds."""
    for message, holds in reasons.items():
        if holds:
            raise ValueError(message)


def check_served(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError if engines cannot do with such a model what `rollout` asks for."""
    check_attention(rollout.engine, shape)
    kind = "linear" if shape.linear else "sparse" if shape.indexer else None
    untried_with_mamba = {
        "rollout.weight_transport disk": rollout.weight_transport == "disk",
        "rollout.router_replay true": rollout.router_replay,
        "rollout.vllm.speculative_config": rollout.vllm.get("speculative_config"),
    }
    reasons = {
        "router_replay true needs a mixture of experts, and this model is dense": (
            rollout.router_replay and shape.moe is None
        ),
        "indexer_replay true needs sparse attention, and this model has no indexers": (
            rollout.indexer_replay and shape.indexer is None
        ),
        f"recompute_kv_cache false is not supported for a model with {kind} attention": (
            kind and not rollout.recompute_kv_cache
        ),
    }
    _refuse({f"rollout.{why}: leave it out": holds for why, holds in reasons.items()})
    if shape.has_mamba:
        message = f"is not supported for a {shape.family}: leave it out"
        _refuse({f"{key} {message}": is_set for key, is_set in untried_with_mamba.items()})
    if rollout.engine == "sglang":
        _check_sglang(rollout, shape)
    if shape.rope_type == "longrope" and rollout.engine == "vllm":
        limit, length = shape.max_position_embeddings, engine_number(rollout, "max_model_len")
        if length is not None and length > limit:
            raise ValueError(
                f"rollout.vllm.max_model_len {length}: in an engine of more than {limit} tokens "
                "vLLM rotates all of them by the long factors of longrope, and the trainer by the "
                f"short ones: use at most {limit}, or leave it out"
            )


def _check_sglang(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for mixtures that SGLang cannot serve in several groups or with whole
    experts, and for arguments that make sparse attention dense or stop an engine."""
    family, moe = shape.family, shape.moe
    groups, experts = rollout.data_parallel_size, rollout.sglang.get("ep_size", 1)
    # Some have attention that is not data-parallel (Mixtral), or a whole embedding (Qwen3.5).
    was_tried = FAMILIES[family].engines.sglang.was_tried_in_groups
    if groups > 1 and moe and not was_tried:
        raise ValueError(
            f"rollout.data_parallel_size {groups} with rollout.engine sglang is not supported for "
            f"a {family}: set it to 1, or use rollout.engine=vllm"
        )
    if experts > 1 and moe and moe.stacks == "alternating":
        raise ValueError(
            f"rollout.sglang.ep_size {experts}: SGLang cannot load whole experts of a {family}: "
            "leave it out"
        )
    for name, value in rollout.sglang.items():
        if shape.indexer and value and (why := reason(name, SGLANG_SPARSE)):
            raise ValueError(
                f"rollout.sglang.{name} {value} is not supported for the sparse attention of a "
                f"{family}: {why}"
            )


def check_attention(engine: str, shape: ModelShape) -> None:
    """Raise ValueError if an engine would ignore attention windows, or lacks a kernel."""
    family, indexer, vllm = shape.family, shape.indexer, FAMILIES[shape.family].engines.vllm
    sizes = {"index_head_dim": indexer.head_dim, "index_topk": indexer.topk} if indexer else {}
    is_mixed = shape.window is not None and len(shape.windowed_layers) < shape.num_layers
    if engine == "vllm":
        _refuse(
            {
                "vLLM quantises keys of an indexer in blocks of 128 elements, and index_head_dim "
                f"is {sizes.get('index_head_dim')}: use a model with a multiple of 128": (
                    indexer and indexer.head_dim % 128
                ),
                f"of the {shape.num_layers} layers of the {family} in model.path, "
                f"{len(shape.windowed_layers)} have a window of attention; engines serve it only "
                "with windows in all layers or in none: to train it without, set "
                "use_sliding_window to false in its config.json": (
                    is_mixed and not vllm.has_mixed_windows
                ),
                f"vLLM drops the bias of attention's output projection of the {family} in "
                "model.path: use rollout.engine=sglang": (
                    shape.has_output_bias and not vllm.has_output_bias
                ),
            }
        )
        return
    unserved = f"rollout.engine sglang is not supported for the {family} in model.path"
    reasons = _obstacles_of_sglang(shape).items()
    _refuse({f"{unserved}, {why}: use vllm": holds for why, holds in reasons})
    _refuse(
        {
            f"SGLang has kernels for indexers with {key} {needed}, and it is {sizes.get(key)}: use "
            "rollout.engine=vllm": indexer and sizes[key] != needed
            for key, needed in SGLANG_INDEXER.items()
        }
    )


def _obstacles_of_sglang(shape: ModelShape) -> dict[str, object]:
    """Reasons why SGLang serves a model on no machine, and whether each holds."""
    family, window = FAMILIES[shape.family], shape.window
    sglang = family.engines.sglang
    return {
        f"as SGLang leaves out the windows of its attention ({window} tokens)": (
            window is not None and not sglang.has_windows
        ),
        "as SGLang has one base of RoPE for layers with windows and without": (
            sglang.has_one_rope and shape.window_rope_theta not in (None, shape.rope_theta)
        ),
        "as SGLang has experts in all of its layers": (
            shape.moe and shape.num_dense_layers and not sglang.has_dense_layers
        ),
        "whose partial or long RoPE was not tried": (
            family.rope.partial_factor is None
            and (shape.rope_type, shape.partial_rotary_factor) != ("default", 1.0)
        ),
        "which has Mamba-2's layers": shape.has_mamba,
        "as SGLang has full attention in one layer of so many, the last of them": (
            shape.linear and full_interval(shape) is None
        ),
        "as SGLang takes its embedding for the head, and they are not tied": (
            sglang.has_whole_embedding and not shape.tie_word_embeddings
        ),
    }


def check_towers_served(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if engines cannot serve the towers of a multimodal model."""
    if rollout.engine == "sglang" and LIMIT in rollout.sglang:
        _check_images_of_sglang(model, rollout)
    if rollout.quantization != "none" and has_other_towers(model.path):
        raise ValueError(
            f"rollout.quantization is {rollout.quantization}, and model.path {model.path} has "
            "towers besides its text tower; supported: none"
        )


def check_cache(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if engines would round keys and values by other scales than the folder's."""
    kind = str(engine_table(rollout).get("kv_cache_dtype"))
    names = locate_tensors(model.path) if kind.startswith("fp8") else ()
    if name := next((name for name in names if name.endswith((".k_scale", ".v_scale"))), None):
        raise ValueError(
            f"rollout.{rollout.engine}.kv_cache_dtype {kind}: model.path has calibrated scales of "
            f"keys and values ({name}), but those of a run's engines, whose weights the ranks "
            "push, are 1: leave it out"
        )


def _check_images_of_sglang(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if SGLang would compute other features of images than the trainer."""
    config, shape = read_json(model.path / "config.json"), read_shape(model.path)
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    key, images = f"rollout.sglang.{LIMIT}", "rollout.engine sglang with images"
    if kind not in WITH_IMAGES:
        raise ValueError(f"{key} lets engines see images, and model.path is a {kind}: leave it out")
    if read_scheme(model.path) is not None:
        raise ValueError(
            f"{images} does not go with quantised weights in {model.path}: convert them to "
            "bfloat16 with checkpoint-convert first"
        )
    own = WITH_IMAGES[kind].sglang
    patch = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
    num_levels = len(vision.get("deepstack_visual_indexes") or ())
    needed: dict[str, tuple[Any, Any]] = {
        "the rope_type of its text": (shape.rope_type, "default"),
        "rollout.sglang.rl_on_policy_target": (rollout.sglang.get("rl_on_policy_target"), None),
    }
    of_model = {
        "the number of values of a patch": (
            prod((vision.get("in_channels", 3), patch[0], *patch)),
            own.patch_values,
        ),
        "the rms_norm_eps of its text": (shape.rms_norm_eps, own.text_rms_norm_eps),
        "the number of deepstack_visual_indexes": (num_levels, own.num_levels),
    }
    needed |= {name: pair for name, pair in of_model.items() if pair[1] is not None}
    _refuse(
        {
            f"{images} of a {kind} needs {value} as {name}, and it is {found}: use "
            "rollout.engine=vllm": found != value
            for name, (found, value) in needed.items()
        }
    )


def check_kernels(rollout: RolloutConfig, shape: ModelShape, dtype: str) -> None:
    """Raise ValueError if an engine of this host lacks kernels for a model of `dtype`."""
    if rollout.base_urls:
        return
    if num_gpus():
        # Only where needed: the query initialises CUDA in this process.
        if rollout.quantization != "none" or shape.has_mamba or shape.indexer:
            import torch  # see above

            check_card(rollout, shape, dtype, torch.cuda.get_device_capability())
    else:
        _check_cpu_kernels(rollout, shape)


def check_card(
    rollout: RolloutConfig, shape: ModelShape, dtype: str, capability: tuple[int, int]
) -> None:
    """Raise ValueError for what an engine lacks on GPUs of this compute capability."""
    engine, found = rollout.engine, ".".join(map(str, capability))
    fp8, sparse = (".".join(map(str, each)) for each in (WITH_FP8, WITH_SPARSE))
    is_quantized, lacks_fp8 = rollout.quantization != "none", capability < WITH_FP8
    is_mixture = shape.has_mamba and shape.moe is not None
    is_rounded = dtype != "float32" and capability[0] not in WITH_ROUTERS_OF_16_BITS
    lacks_sparse = dtype != "bfloat16" or capability < WITH_SPARSE
    _refuse(
        {
            # SGLang would rearrange the weights for Marlin, and pushed ones would not fit.
            f"rollout.quantization {rollout.quantization} with rollout.engine sglang needs GPUs of "
            f"compute capability {fp8} or more, not {found}, for which SGLang rearranges the "
            "weights: leave it out": engine == "sglang" and is_quantized and lacks_fp8,
            f"rollout.engine vllm has the routers of a {shape.family} in float32 on GPUs of "
            f"compute capability {found}, and pushes bring them in {dtype}: use GPUs of 9.0 or "
            "10.x, or set model.dtype=float32": engine == "vllm" and is_mixture and is_rounded,
            f"rollout.engine {engine} serves sparse attention in bfloat16 and on GPUs of compute "
            f"capability {sparse} or more, not in {dtype} on {found}: set model.dtype=bfloat16 and "
            "use such GPUs": shape.indexer and lacks_sparse,
        }
    )


def _check_cpu_kernels(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for models that engines cannot compute on this CPU, or not with pushed
    weights: they would start, and die at the first request or compute other numbers."""
    import torch  # see above

    engine, quantization = rollout.engine, rollout.quantization
    others = {
        f"experts (a {shape.family})": shape.moe,
        f"latent attention (a {shape.family})": shape.latent,
        f"linear attention (a {shape.family})": shape.linear,
        f"rollout.quantization {quantization}": quantization != "none",
    }
    lacks = {
        # torch lists AVX2 on x86 only.
        "needs AVX2, which this CPU lacks": not torch.cpu.get_capabilities().get("avx2", True),
        f"needs heads of size {', '.join(map(str, CPU_HEAD_SIZES))}, not {shape.head_dim}": (
            not shape.latent and shape.head_dim not in CPU_HEAD_SIZES
        ),
    }
    serves_others = bool(entry_points(group=CPU_KERNELS))
    _refuse(
        {
            f"rollout.engine {engine} without a GPU serves dense models alone, without "
            f"quantisation, and not {what}, of which its kernels for CPUs rearrange weights: use "
            "engines on GPUs": holds and not serves_others
            for what, holds in others.items()
        }
        | {
            f"rollout.engine vllm without a GPU {why}: use engines on GPUs": (
                engine == "vllm" and holds
            )
            for why, holds in lacks.items()
        }
    )


def check_drafts(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if engines would draft with weights that they do not have."""
    drafts, rollout = "rollout.vllm.speculative_config", cfg.rollout
    table = rollout.vllm.get("speculative_config") or {}
    if not isinstance(table, dict):
        raise ValueError(
            f"{drafts} is {table!r}: give a table, such as "
            "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 2}"
        )
    if not table:
        return
    method, model = str(table.get("method")), table.get("model")
    is_mtp, is_own = method.endswith("mtp"), model in (None, str(cfg.model.path))
    is_stored, is_rounded = read_scheme(cfg.model.path) is not None, rollout.quantization != "none"
    stored = quantization_table(read_json(cfg.model.path / "config.json")) or {}
    is_other = (stored.get("quant_method") == "fp8") != (rollout.quantization == "fp8")
    _refuse(
        {
            f"{drafts} is not supported for a model with sparse attention: leave it out": (
                shape.indexer
            ),
            # vLLM would infer a method from the model.
            f"{drafts} {table} has no method: give its method, such as mtp": (
                table.get("method") is None
            ),
            f"{drafts} drafts with {method} and the layer of {model}, and model.path has quantised "
            "weights, which vLLM dequantises with its own layer alone: leave out `model`": (
                is_mtp and not is_own and is_stored
            ),
            # vLLM gives the engines' format to the drafter, which keeps the folder's.
            f"{drafts} drafts with the layer of model.path, which is quantised in another format "
            f"than rollout.quantization={rollout.quantization}: leave one of the two out": (
                is_mtp and is_own and is_stored and is_rounded and is_other
            ),
            f"{drafts} drafts with the first of several layers of model.path, and quantised "
            "engines need all: leave it out": (
                is_mtp and is_own and (is_stored or is_rounded) and not shape.can_train_mtp
            ),
        }
    )
    if is_mtp and is_own and not shape.trains_mtp and not mtp_tensors(cfg.model.path, shape):
        raise ValueError(
            f"{drafts} drafts with {method}, and model.path has no layer for multi-token "
            "prediction: give as its `model` a folder that has it, or leave it out"
        )
