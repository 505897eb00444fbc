"""Linear layers in FP8 (`model.megatron.fp8`) in a plan: weights, inputs and rate.

Read in Transformer Engine 2.19's `linear.py`, `layernorm_linear.py` and `grouped_linear.py`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.layer_kinds import LayerKind, layer_kinds
from megatron_grpo.planning.parameters import parameters_of_layer
from parallel import pipeline_layers

SCALES = {"blockwise": 4 / 128, "mxfp8": 1 / 32, "tensorwise": 0.0}
"""Bytes of scales for each number: a float32 for 128 numbers of a token, a byte for 32."""
SCALES_OF_WEIGHTS = SCALES | {"blockwise": 4 / 128**2}
OF_ATTENTION = "self_attention."
LINEAR = (".linear_", ".in_proj.", ".out_proj.")
"""Parts of the names of the weights of linear layers; routers and gates have others."""
CAPABILITIES = {
    "blockwise": ((9, 0), (10, 0), "h100"),
    "mxfp8": ((10, 0), (11, 0), "b200"),
    "tensorwise": ((8, 9), (11, 0), "h100"),
}
"""The first compute capability with a recipe, the first without, and a card that has it."""


def has_fp8(cfg: Config) -> bool:
    """Whether linear layers multiply in FP8, but for those of layers in bfloat16."""
    return bool(cfg.model.megatron.get("fp8"))


def _recipe(cfg: Config) -> str:
    recipe = cfg.model.megatron.get("fp8_recipe")
    if recipe not in SCALES:
        raise ValueError(
            f"model.megatron.fp8 needs model.megatron.fp8_recipe, one of {', '.join(SCALES)}"
        )
    return recipe


def check_fp8_card(cfg: Config, card: GpuSpec) -> None:
    """Raise ValueError if the card cannot multiply by the recipe of `cfg`, or none could."""
    if not has_fp8(cfg):
        return
    if cfg.model.dtype != "bfloat16" or cfg.model.megatron.get("transformer_impl") == "local":
        raise ValueError(
            "model.megatron.fp8 needs Transformer Engine's layers in bfloat16: set "
            "model.dtype=bfloat16 and leave transformer_impl out, or leave fp8 out"
        )
    recipe = _recipe(cfg)
    first, end, other = CAPABILITIES[recipe]
    if not first <= card.capability < end:
        raise ValueError(
            f"model.megatron.fp8_recipe {recipe} is not for this GPU, of compute capability "
            f"{'.'.join(map(str, card.capability))}: plan for another, such as --gpu {other}, or "
            "use blockwise on Hopper and mxfp8 on Blackwell, or leave fp8 out"
        )


def without_fp8(cfg: Config) -> Config:
    kept = {name: value for name, value in cfg.model.megatron.items() if name != "fp8"}
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"megatron": kept})})


def fp8_layers(cfg: Config, num_layers: int) -> range:
    """The layers that `first_last_layers_bf16` leaves in FP8."""
    settings = cfg.model.megatron
    if not settings.get("first_last_layers_bf16"):
        return range(num_layers)
    first, last = (settings.get(f"num_layers_at_{end}_in_bf16", 1) for end in ("start", "end"))
    return range(first, num_layers - last)


def kinds_of_layers(cfg: Config, shape: ModelShape) -> Sequence[tuple[Config, LayerKind]]:
    """The kinds of layers, those in bfloat16 apart from those in FP8, each with its config."""
    if not has_fp8(cfg):
        return [(cfg, kind) for kind in layer_kinds(shape)]
    in_fp8, plain = frozenset(fp8_layers(cfg, shape.num_layers)), without_fp8(cfg)
    both = [
        (config, replace(kind, layers=layers))
        for kind in layer_kinds(shape)
        for config, layers in ((cfg, kind.layers & in_fp8), (plain, kind.layers - in_fp8))
    ]
    return [(config, kind) for config, kind in both if kind.layers]


def kinds_of_stage(
    cfg: Config, shape: ModelShape, stage: int
) -> Sequence[tuple[Config, LayerKind]]:
    """Entries of `kinds_of_layers` that a pipeline stage has."""
    chunks = pipeline_layers(shape.num_layers, cfg.dims)[stage]
    return [each for each in kinds_of_layers(cfg, shape) if each[1].count_in(*chunks)]


def input_itemsize(cfg: Config) -> float:
    """Bytes that a linear layer keeps of each element of its input, in one direction if in FP8."""
    return 1 + SCALES[_recipe(cfg)] if has_fp8(cfg) else ITEMSIZE[cfg.model.dtype]


def less_of_inputs(cfg: Config) -> float:
    """Bytes that a linear layer in FP8 keeps less of an element of its input than in bfloat16.

    Those whose input is kept in bfloat16 by others, too (the product after attention, which keeps
    its output; the shared experts, whose input the router keeps), keep that and no other: Megatron
    sets `save_original_input`.
    """
    return ITEMSIZE[cfg.model.dtype] - input_itemsize(cfg)


def expert_itemsize(cfg: Config) -> float:
    """Bytes that experts keep of an element of a token: only with `mxfp8`, or where it stays on the
    GPU, in FP8."""
    settings = cfg.model.megatron
    if "expert_fc1" in settings.get("offload_modules", ()) and has_fp8(cfg):
        cfg = cfg if settings.get("fp8_recipe") == "mxfp8" else without_fp8(cfg)
    return input_itemsize(cfg)


@cache
def linear_elements(
    layer: ModelShape, tensor: int = 1, expert_tensor: int = 1
) -> Mapping[str, int]:
    """Elements that a rank has of the weights of a layer's linear layers, by `activations.PARTS`;
    those of ``moe`` are of one expert. All layers of the model are of one kind."""
    elements: dict[str, int] = defaultdict(int)
    for each in parameters_of_layer(layer, tensor, expert_tensor):
        if any(part in each.name for part in LINEAR) and each.is_matrix:
            elements[_part(each.name)] += each.size
    return elements


def _part(name: str) -> str:
    if OF_ATTENTION in name:
        return "attention"
    if ".shared_experts." in name:
        return "shared_experts"
    return "moe" if ".experts." in name else "mlp"


def fp8_weight_bytes(cfg: Config, shape: ModelShape, stage: int, *, backward: bool) -> int:
    """Bytes of the weights in FP8 that a rank of a stage holds during a pass.

    A backward multiplies by the transposed weight, which is another copy (not so for `tensorwise`
    on Blackwell: counted all the same). A forward alone has one, or both if layers recompute.
    """
    if not has_fp8(cfg):
        return 0
    dims, chunks = cfg.dims, pipeline_layers(shape.num_layers, cfg.dims)[stage]
    total = 0
    for config, kind in kinds_of_stage(cfg, shape, stage):
        if has_fp8(config):
            parts = dict(linear_elements(kind.shape, dims.tensor, dims.expert_tensor))
            if kind.shape.moe is not None:
                parts["moe"] *= kind.shape.moe.num_experts // dims.expert
            total += kind.count_in(*chunks) * sum(parts.values())
    copies = 2 if backward or cfg.model.megatron.get("recompute_granularity") else 1
    return round(copies * (1 + SCALES_OF_WEIGHTS[_recipe(cfg)]) * total)


def saved_flops(cfg: Config, layer: ModelShape, tokens: int, card: GpuSpec) -> dict[str, float]:
    """Operations in bfloat16 whose time a forward of each part of a layer saves by FP8."""
    if not has_fp8(cfg):
        return {}
    assert card.fp8_flops is not None, "see `check_fp8_card`"
    saved = 2.0 * tokens * (1 - card.flops / card.fp8_flops)
    parts = dict(linear_elements(layer))
    if layer.moe is not None:
        parts["moe"] *= layer.moe.experts_per_token
    return {part: saved * elements for part, elements in parts.items()}
