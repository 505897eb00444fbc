"""Shards of the workers of an engine: layouts, dtypes and sizes, from the config alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from checkpoint_convert import ModelShape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Parameter
from checkpoint_convert.families.vision import VISION, vision_tower
from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.quantized.model import (
    QuantizedModel,
    check_quantized_served,
    quantized_engine_dtypes,
    quantized_engine_layouts,
    quantized_model,
)
from checkpoint_convert.vllm import (
    VOCAB_MULTIPLE,
    EngineDims,
    engine_dtypes,
    engine_layouts,
    first_worker_layout,
    worker_layout,
)
from checkpoint_convert.vllm_lora import adapter_layouts
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.policy.lora_targets import targets_of
from parallel import Box, Layout, ShardMapping

SGLANG_NAMES = {
    ".experts.routed_experts.": ".experts.",
    ".fused_qkv_a_proj.": ".fused_qkv_a_proj_with_mqa.",
}
"""SGLang 0.5.23's parts of parameter names, by vLLM's; see `Sglang.names`."""
SGLANG_DTYPES = {
    ".sinks": "bfloat16",
    "_weight_bias": "float32",
    ".indexer.weights_proj.weight": "bfloat16",
}
"""Fixed dtypes of parameters in SGLang, by name endings."""
IN_ONE_MATRIX = (".indexer.wk_weights_proj.", (".indexer.wk.", ".indexer.weights_proj."))
"""Name part of vLLM's fused matrix, and of the two matrices in SGLang."""
EMBEDDING = "model.embed_tokens.weight"
SGLANG_TOWER = {".attn.qkv.": ".attn.qkv_proj."}
"""`SGLANG_NAMES` of vision towers."""
PLACES, PLACES_MULTIPLE = "visual.pos_embed.weight", VOCAB_MULTIPLE
"""Position embedding, which SGLang splits and pads like a token embedding."""
HIDDEN, HIDDEN_MULTIPLE = re.compile(r"\.mlp\.(gate_up_proj|down_proj)\."), 8
"""The MLP of a Qwen2.5-VL's vision tower, which SGLang pads."""


@dataclass(frozen=True)
class WorkerShards:
    """The shards of an engine's workers, in rank order; the same for all engines."""

    weights: list[Layout]
    """The model's weights, in the coordinates of the weight files."""
    adapters: list[Layout] | None
    """Adapters in PEFT's coordinates, if pushes fill these instead of the weights."""
    dtypes: Mapping[str, str]
    """Dtype of every local tensor, by name."""

    @property
    def pushed(self) -> list[Layout]:
        """The layouts that pushes fill."""
        return self.weights if self.adapters is None else self.adapters

    @property
    def all(self) -> list[Layout]:
        """Weights and adapters together."""
        if self.adapters is None:
            return self.weights
        return [
            Layout({**a.shapes, **b.shapes}, a.pieces + b.pieces, a.zeros + b.zeros)
            for a, b in zip(self.weights, self.adapters, strict=True)
        ]


def worker_shards(cfg: Config, shape: ModelShape) -> WorkerShards:
    """The shards of the workers of the engines of `cfg`."""
    model = quantized_engine(cfg.rollout, shape, cfg.model.dtype)
    weights = worker_layouts(shape, cfg.rollout, model)
    dtypes, adapters = worker_dtypes(shape, cfg.rollout, cfg.model.dtype, model), None
    if cfg.lora.is_served:
        modules = targets_of(cfg.lora, shape)
        adapters = adapter_layouts(shape, engine_dims(cfg.rollout), modules, cfg.lora.r)
        dtypes |= dict.fromkeys(adapters[0].shapes, cfg.model.dtype)
    return WorkerShards(weights, adapters, dtypes)


def quantized_engine(
    rollout: RolloutConfig, shape: ModelShape, dtype: str
) -> QuantizedModel | None:
    """Quantisation of a model of `dtype` in engines; None without. ValueError if unsupported."""
    ignore, dims = tuple(rollout.quantization_ignore), engine_dims(rollout)
    shape = served_shape(shape, rollout)
    return _quantized(rollout.quantization, ignore, rollout.engine, dims, shape, dtype)


@lru_cache(maxsize=2)  # pushes and plans call it again: seconds and 60 MB for 1,000B parameters
def _quantized(
    quantization: str,
    ignore: tuple[str, ...],
    engine: str,
    dims: EngineDims,
    shape: ModelShape,
    dtype: str,
) -> QuantizedModel | None:
    model = quantized_model(quantization, shape, NAMES[dtype], ignore)
    if model is None:
        return None
    sglang = FAMILIES[shape.family].engines.sglang
    if engine == "sglang" and sglang.drops_scales:
        raise ValueError(
            f"rollout.quantization {quantization} with rollout.engine sglang is not "
            f"supported for {shape.family}, whose scales SGLang drops: leave it out, or use "
            "rollout.engine=vllm"
        )
    down = ".kv_a_proj_with_mqa.weight"
    if (
        engine == "sglang"
        and sglang.quantizes_latents
        and _num_quantized(model, down) < shape.num_layers
    ):
        raise ValueError(
            f"rollout.quantization_ignore names {down.removesuffix('.weight')[1:]}, which "
            f"SGLang quantises in {shape.family} all the same: leave it and q_a_proj out, or "
            "use rollout.engine=vllm"
        )
    check_quantized_served(shape, dims, model, engine)
    return model


def engine_dims(rollout: RolloutConfig) -> EngineDims:
    """Parallel sizes of each engine."""
    has_whole_experts = rollout.vllm.get("enable_expert_parallel", False)
    if rollout.engine == "sglang":
        has_whole_experts = rollout.sglang.get("ep_size", 1) > 1
    return EngineDims(
        tensor=rollout.tensor_parallel_size,
        data=rollout.data_parallel_size,
        expert_parallel=bool(has_whole_experts),
        gathers_mlps=rollout.engine == "sglang",
    )


def served_shape(shape: ModelShape, rollout: RolloutConfig) -> ModelShape:
    """The model, without its multi-token-prediction layer unless engines draft with it."""
    return replace(shape, trains_mtp=shape.trains_mtp and rollout.drafts_with_mtp)


def worker_layouts(
    shape: ModelShape, rollout: RolloutConfig, model: QuantizedModel | None = None
) -> list[Layout]:
    """Layouts of an engine's workers in rank order, with scales if `model` is quantised."""
    shape, dims = served_shape(shape, rollout), engine_dims(rollout)
    layouts = engine_layouts(shape, dims)
    if model is not None:
        layouts = quantized_engine_layouts(layouts, shape, dims, model)
    if rollout.engine != "sglang":
        return layouts
    return [_sglang_layout(layout, shape, dims, number) for number, layout in enumerate(layouts)]


def first_worker(shape: ModelShape, rollout: RolloutConfig) -> Layout:
    """Layout of the first worker, which is the largest; far faster than `worker_layouts`."""
    dims = engine_dims(rollout)
    layout = first_worker_layout(served_shape(shape, rollout), dims)
    return _sglang_layout(layout, shape, dims, 0) if rollout.engine == "sglang" else layout


def worker_dtypes(
    shape: ModelShape, rollout: RolloutConfig, dtype: str, model: QuantizedModel | None = None
) -> dict[str, str]:
    """Dtype of every parameter of the workers, by name; unquantised parameters have `dtype`."""
    shape = served_shape(shape, rollout)
    dtypes = engine_dtypes(shape, dtype)
    if model is not None:
        dtypes = quantized_engine_dtypes(dtypes, shape, model)
    if rollout.engine == "sglang":
        own = {name: _sglang_names(name, shape.family) for name in dtypes}
        return {each: _sglang_dtype(each, dtypes[name]) for name in dtypes for each in own[name]}
    return dtypes


def _sglang_layout(layout: Layout, shape: ModelShape, dims: EngineDims, number: int) -> Layout:
    """Convert a layout of vLLM into SGLang's for worker `number`. They differ in names,
    `IN_ONE_MATRIX`, whole embeddings and vision towers; parts, fusion and padding are equal."""
    layout = _with_sglang_tower(_unfused(layout), shape, dims, number)
    names = {name: _sglang_name(name, shape.family) for name in layout.shapes}
    shapes = {names[name]: size for name, size in layout.shapes.items()}
    pieces = tuple(replace(piece, local=names[piece.local]) for piece in layout.pieces)
    zeros = tuple((names[name], box) for name, box in layout.zeros)
    if FAMILIES[shape.family].engines.sglang.has_whole_embedding:
        shapes[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        box = Box.whole(shapes[EMBEDDING])
        # All workers hold the whole embedding: the first worker's is the original, the others' are
        # replicas.
        own = ShardMapping(EMBEDDING, box, EMBEDDING, box, is_replica=number > 0)
        pieces = (own, *(piece for piece in pieces if piece.local != EMBEDDING))
        zeros = tuple((name, box) for name, box in zeros if name != EMBEDDING)
    return Layout(shapes, pieces, zeros)


def _unfused(layout: Layout) -> Layout:
    """Split each matrix of `IN_ONE_MATRIX` into its parts, named as in weight files."""
    fused, _ = IN_ONE_MATRIX
    shapes = {name: size for name, size in layout.shapes.items() if fused not in name}
    pieces = tuple(
        replace(each, local=each.tensor, local_box=each.box) if fused in each.local else each
        for each in layout.pieces
    )
    own = {each.local: each.box.size for each in pieces if each.local not in shapes}
    return Layout(shapes | own, pieces, layout.zeros)


def _with_sglang_tower(layout: Layout, shape: ModelShape, dims: EngineDims, number: int) -> Layout:
    """Replace a trained vision tower by SGLang's, which differs in padding."""
    parameters = [_padded_as_in_sglang(each) for each in vision_tower(shape.vision, in_engine=True)]
    tower = worker_layout(parameters, shape, dims, number)
    pieces = tuple(each for each in layout.pieces if not each.local.startswith(VISION))
    shapes = {**layout.shapes, **tower.shapes}
    return Layout(shapes, pieces + tower.pieces, layout.zeros + tower.zeros)


def _padded_as_in_sglang(parameter: Parameter) -> Parameter:
    """Pad a parameter of a vision tower along its split dimension, as SGLang does."""
    dim = parameter.vllm.split
    if parameter.vllm.name == PLACES:
        zeros = -parameter.shape[0] % PLACES_MULTIPLE
        return replace(parameter, vllm=replace(parameter.vllm, split=0), zero_rows=zeros)
    if dim is None or not HIDDEN.search(parameter.vllm.name):
        return parameter
    return replace(parameter, zero_rows=-parameter.sources[0].shape[dim] % HIDDEN_MULTIPLE)


def _sglang_names(name: str, family: str) -> list[str]:
    fused, own = IN_ONE_MATRIX
    names = [name.replace(fused, each) for each in own] if fused in name else [name]
    return [_sglang_name(each, family) for each in names]


def _sglang_name(name: str, family: str) -> str:
    is_of_tower = name.startswith(VISION)
    of_family = SGLANG_TOWER if is_of_tower else FAMILIES[family].engines.sglang.names
    for part, own in {**SGLANG_NAMES, **of_family}.items():
        name = name.replace(part, own)
    return name


def _sglang_dtype(name: str, dtype: str) -> str:
    own = [own for end, own in SGLANG_DTYPES.items() if name.endswith(end)]
    return own[0] if own else dtype


def _num_quantized(model: QuantizedModel, ending: str) -> int:
    return sum(name.endswith(ending) for name in model.matrices)


def num_copied_latents(rollout: RolloutConfig, shape: ModelShape, dtype: str) -> int:
    """Number of layers whose latent up-projection workers hold twice: all layers in SGLang,
    quantised layers in vLLM (in its other layers, the second is a view)."""
    if shape.latent is None or (rollout.engine, rollout.quantization) == ("vllm", "none"):
        return 0
    if rollout.engine != "vllm" or not rollout.quantization_ignore:
        return shape.num_layers + served_shape(shape, rollout).trains_mtp
    model = quantized_engine(rollout, shape, dtype)
    assert model is not None, "rollout.quantization is not none"
    return _num_quantized(model, ".kv_b_proj.weight")


def shard_bytes(workers: Sequence[Layout], itemsizes: Mapping[str, int]) -> int:
    """Weight bytes of an engine's fullest worker; `itemsizes` are bytes per element, by name."""
    return max(
        sum(itemsizes[name] * prod(size) for name, size in worker.shapes.items())
        for worker in workers
    )
