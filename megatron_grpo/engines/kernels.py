"""Whether an engine can serve a model: at all, and with the kernels that it has on this machine."""

from importlib.metadata import entry_points
from math import prod
from typing import Any

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.folder import read_json
from checkpoint_convert.hf_config import has_other_towers, read_scheme
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.config.vision import TRAINABLE
from megatron_grpo.engines.sglang.args import LIMIT, full_interval

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32 has an attention kernel for CPUs."""
SGLANG_INDEXER = {"index_head_dim": 128, "index_topk": 2048}
"""The one size of an indexer's keys that SGLang 0.5.23 caches, and the one number of chosen tokens:
its kernels for prompts assert it, and up to 2,048 tokens it reads them with dense attention."""
SGLANG_DENSE = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Arguments with which SGLang no longer takes its sparse attention by itself."""
SGLANG_DETERMINISTIC = ("enable_deterministic_inference", "rl_on_policy_target")
"""Arguments with which SGLang ends at its start, if attention is sparse."""
WITH_SPARSE = (9, 0)
"""Compute capability from which vLLM and SGLang have sparse attention."""
SGLANG_WINDOWS = ("gemma3_text", "gpt_oss", "olmo3")
"""Families whose sliding windows SGLang 0.5.23 computes; in all others it attends to all tokens."""
SGLANG_GROUPS = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("kimi_k2", "qwen3_moe"),
)
"""Families of which engines of SGLang were tried with several groups of workers; of those with
sparse attention, which only GPUs compute, what workers load."""
SGLANG_PATCH = 1176
"""Values of a patch of a Qwen2.5-VL's images: SGLang takes others for features."""
SGLANG_LEVELS = 3
"""To the outputs of how many layers of a Qwen3-VL with experts SGLang adds features."""
SGLANG_EPSILON = 1e-6
"""Of norms of vision towers. SGLang gives a Qwen3-VL's that of the text."""
CPU_KERNELS = "megatron_grpo.cpu_kernels"
"""The group of entry points by which a plugin of engines says that it brings other kernels for
CPUs."""
WITH_FP8 = (8, 9)
"""Compute capability from which GPUs have units for FP8."""
WITH_ROUTERS_OF_16_BITS = (9, 10)
"""Major compute capabilities for which vLLM 0.32 leaves routers of Nemotron-H in the dtype of the
model: for others it has them in float32."""


def num_gpus() -> int:
    """GPUs that this process sees."""
    import torch  # takes seconds, and checks of config do not need it

    return torch.cuda.device_count()


def check_served(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError if `rollout` asks for what engines cannot do with such a model."""
    if rollout.router_replay and shape.moe is None:
        raise ValueError(
            "rollout.router_replay true needs a mixture of experts, and this model is dense: leave "
            "it out"
        )
    if rollout.indexer_replay and shape.indexer is None:
        raise ValueError(
            "rollout.indexer_replay true needs sparse attention, and this model has no indexers: "
            "leave it out"
        )
    check_attention(rollout.engine, shape)
    if rollout.engine == "sglang":
        _check_groups(rollout, shape)
    if shape.has_mamba:
        _check_mamba(rollout, shape)
    if shape.indexer is not None:
        _check_sparse(rollout, shape)
    kind = "linear" if shape.linear else "sparse" if shape.indexer else None
    if kind and not rollout.recompute_kv_cache:
        raise ValueError(
            f"rollout.recompute_kv_cache false is not supported for a model with {kind} attention: "
            "leave it out"
        )


def check_towers_served(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError for engines of a multimodal model that are not there."""
    _check_images(model, rollout)
    if rollout.quantization != "none" and has_other_towers(model.path):
        raise ValueError(
            f"rollout.quantization is {rollout.quantization}, and model.path {model.path} has "
            "other towers beside that of text; supported: none"
        )


def _check_groups(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for a mixture that SGLang does not serve in several groups of workers, or
    with whole experts.

    Attention of some is not data-parallel (Mixtral), or their embedding is whole (Qwen3.5).
    """
    groups, experts = rollout.data_parallel_size, rollout.sglang.get("ep_size", 1)
    if groups > 1 and shape.moe is not None and shape.family not in SGLANG_GROUPS:
        raise ValueError(
            f"rollout.data_parallel_size {groups} with rollout.engine sglang is not supported for "
            f"a {shape.family}: set it to 1, or use rollout.engine=vllm"
        )
    untried = {
        "rollout.tensor_parallel_size above 1": rollout.tensor_parallel_size > 1,
        "rollout.in_flight_updates": rollout.in_flight_updates,
        "rollout.router_replay": rollout.router_replay,
        "rollout.enable_sleep_mode": rollout.enable_sleep_mode,
        "rollout.quantization": rollout.quantization != "none",
        f"rollout.sglang.{LIMIT}": LIMIT in rollout.sglang,
    }
    if groups > 1 and (told := [key for key, is_set in untried.items() if is_set]):
        raise ValueError(
            f"{told[0]} was not tried with rollout.data_parallel_size {groups} and rollout.engine "
            "sglang: leave it out, or use rollout.engine=vllm"
        )
    if experts > 1 and shape.moe is not None and shape.moe.stacks == "alternating":
        raise ValueError(
            f"rollout.sglang.ep_size {experts}: SGLang cannot load whole experts of a "
            f"{shape.family}: leave it out"
        )


def _check_mamba(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for what was not tried with Mamba-2's layers."""
    untried = {
        "rollout.weight_transport disk": rollout.weight_transport == "disk",
        "rollout.router_replay true": rollout.router_replay,
        "rollout.vllm.speculative_config": bool(rollout.vllm.get("speculative_config")),
    }
    if told := [key for key, is_on in untried.items() if is_on]:
        raise ValueError(f"{told[0]} is not supported for a {shape.family}: leave it out")


def _check_sparse(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for arguments that would make SGLang's attention dense, or end it."""
    reasons = dict.fromkeys(SGLANG_DENSE, "SGLang chooses `dsa` only if it is left out")
    reasons |= dict.fromkeys(
        SGLANG_DETERMINISTIC, "SGLang's `dsa` has no such kernels: leave it out"
    )
    for name, reason in reasons.items():
        if value := rollout.sglang.get(name):
            raise ValueError(
                f"rollout.sglang.{name} {value} is not supported for the sparse attention of a "
                f"{shape.family}: {reason}"
            )


def check_attention(engine: str, shape: ModelShape) -> None:
    """Raise ValueError if an engine would leave out windows, or not compute attention."""
    if engine == "sglang" and (why := _obstacle_of_sglang(shape)):
        raise ValueError(
            f"rollout.engine sglang is not supported for the {shape.family} in model.path, {why}: "
            "use vllm"
        )
    if engine == "vllm" and shape.indexer is not None and shape.indexer.head_dim % 128:
        raise ValueError(
            "vLLM quantises keys of an indexer in blocks of 128 elements, and index_head_dim is "
            f"{shape.indexer.head_dim}: use a model with a multiple of 128"
        )
    if engine == "sglang" and shape.indexer is not None:
        sizes = {"index_head_dim": shape.indexer.head_dim, "index_topk": shape.indexer.topk}
        for key, needed in SGLANG_INDEXER.items():
            if sizes[key] != needed:
                raise ValueError(
                    f"SGLang has kernels for indexers with {key} {needed}, and it is {sizes[key]}: "
                    "use rollout.engine=vllm"
                )
    windows = FAMILIES[shape.family].windows
    if shape.window is None or windows is None:
        return
    is_mixed = len(shape.windowed_layers) < shape.num_layers
    if engine == "vllm" and is_mixed and not windows.are_mixed_in_engine:
        raise ValueError(
            f"of the {shape.num_layers} layers of the {shape.family} in model.path, "
            f"{len(shape.windowed_layers)} have a window of attention; engines serve it only with "
            "windows in all layers or in none: to train it without, set use_sliding_window to "
            "false in its config.json"
        )


def _obstacle_of_sglang(shape: ModelShape) -> str | None:
    """Why SGLang does not serve a model on any machine."""
    if shape.window is not None and shape.family not in SGLANG_WINDOWS:
        return f"as SGLang leaves out the windows of its attention ({shape.window} tokens)"
    if shape.family == "olmo3" and shape.window_rope_theta not in (None, shape.rope_theta):
        return "as SGLang has one base of RoPE for layers with windows and without"
    if shape.has_mamba:
        return "which has Mamba-2's layers"
    if shape.linear is not None and full_interval(shape) is None:
        return "as SGLang has full attention in one layer of so many, the last of them"
    if shape.family == "gemma3_text" and not shape.tie_word_embeddings:
        return "as SGLang takes its embedding for the head, and they are not tied"
    return None


def _check_images(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if SGLang would compute other features of images than the trainer."""
    if rollout.engine != "sglang" or LIMIT not in rollout.sglang:
        return
    config, shape = read_json(model.path / "config.json"), read_shape(model.path)
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    if kind not in TRAINABLE:
        raise ValueError(
            f"rollout.sglang.{LIMIT} lets engines see images, and model.path is a {kind}: leave it "
            "out"
        )
    if read_scheme(model.path) is not None:
        raise ValueError(
            f"rollout.engine sglang with images does not go with quantised weights in {model.path}"
            ": convert them to bfloat16 with checkpoint-convert first"
        )
    needed: dict[str, tuple[Any, Any]] = {
        "the rope_type of its text": ((shape.rope_scaling or {}).get("rope_type"), None),
        "rollout.sglang.rl_on_policy_target": (rollout.sglang.get("rl_on_policy_target"), None),
    }
    if kind == "qwen2_5_vl":
        sizes = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
        values = prod((vision.get("in_channels", 3), sizes[0], *sizes))
        needed["the number of values of a patch"] = values, SGLANG_PATCH
    else:
        needed["the rms_norm_eps of its text"] = shape.rms_norm_eps, SGLANG_EPSILON
    if kind == "qwen3_vl_moe":
        levels = len(vision.get("deepstack_visual_indexes") or ())
        needed["the number of deepstack_visual_indexes"] = levels, SGLANG_LEVELS
    for name, (found, value) in needed.items():
        if found != value:
            raise ValueError(
                f"rollout.engine sglang with images of a {kind} needs {value} as {name}, and it is "
                f"{found}: use rollout.engine=vllm"
            )


def check_kernels(rollout: RolloutConfig, shape: ModelShape, dtype: str) -> None:
    """Raise ValueError if an engine, started here, would need kernels that it lacks for the GPUs,
    or without any for the CPU. `dtype`: of the model."""
    if rollout.base_urls:
        return
    if num_gpus():
        # Else CUDA is not initialized here.
        if rollout.quantization != "none" or shape.has_mamba or shape.indexer:
            import torch  # see above

            check_card(rollout, shape, dtype, torch.cuda.get_device_capability())
    else:
        _check_cpu_kernels(rollout, shape)


def check_card(
    rollout: RolloutConfig, shape: ModelShape, dtype: str, capability: tuple[int, int]
) -> None:
    """Raise ValueError for what an engine lacks on GPUs of this compute capability.

    SGLang would rearrange 8-bit weights for Marlin after loading. vLLM has routers beside Mamba-2's
    layers in float32, and pushes bring them in `dtype`. Sparse attention is for bfloat16 alone.
    """
    engine, found = rollout.engine, ".".join(map(str, capability))
    if engine == "sglang" and rollout.quantization != "none" and capability < WITH_FP8:
        raise ValueError(
            f"rollout.quantization {rollout.quantization} with rollout.engine sglang needs GPUs of "
            f"compute capability {'.'.join(map(str, WITH_FP8))} or more, not {found}, for which "
            "SGLang rearranges the weights: leave it out"
        )
    has_routers = engine == "vllm" and shape.has_mamba and shape.moe is not None
    if has_routers and dtype != "float32" and capability[0] not in WITH_ROUTERS_OF_16_BITS:
        raise ValueError(
            f"rollout.engine vllm has the routers of a {shape.family} in float32 on GPUs of "
            f"compute capability {found}, and pushes bring them in {dtype}: use GPUs of 9.0 or "
            "10.x, or set model.dtype=float32"
        )
    if shape.indexer is not None and (dtype != "bfloat16" or capability < WITH_SPARSE):
        raise ValueError(
            f"rollout.engine {engine} serves sparse attention in bfloat16 and on GPUs of compute "
            f"capability {'.'.join(map(str, WITH_SPARSE))} or more, not in {dtype} on {found}: set "
            "model.dtype=bfloat16 and use such GPUs"
        )


def _check_cpu_kernels(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Raise ValueError for what engines do not compute on this CPU, or not with pushed weights.

    An engine would start all the same, and die at its first request or compute other numbers.
    """
    import torch  # see above

    engine, quantization = rollout.engine, rollout.quantization
    others = {
        f"experts (a {shape.family})": shape.moe is not None,
        f"latent attention (a {shape.family})": shape.latent is not None,
        f"linear attention (a {shape.family})": shape.linear is not None,
        f"rollout.quantization {quantization}": quantization != "none",
    }
    found = [key for key, is_so in others.items() if is_so]
    if found and not entry_points(group=CPU_KERNELS):
        raise ValueError(
            f"rollout.engine {engine} without a GPU serves dense models alone, without "
            f"quantisation, and not {found[0]}, of which its kernels for CPUs rearrange weights: "
            "use engines on GPUs"
        )
    lacks = {
        # Other architectures do not list it.
        "needs AVX2, which this CPU lacks": not torch.cpu.get_capabilities().get("avx2", True),
        f"needs heads of size {', '.join(map(str, CPU_HEAD_SIZES))}, not "
        f"{shape.head_dim}": not shape.latent and shape.head_dim not in CPU_HEAD_SIZES,
    }
    if engine == "vllm" and (told := [key for key, is_so in lacks.items() if is_so]):
        raise ValueError(f"rollout.engine vllm without a GPU {told[0]}: use engines on GPUs")
