"""Precision of linear layers: the dtype of the model, or FP8 (`model.megatron.fp8`).

States bytes kept of inputs, copies of weights, and relative time. Figures of FP8 come from
Transformer Engine 2.19: `linear.py`, `layernorm_linear.py`, `grouped_linear.py`.
"""

from dataclasses import dataclass

from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec

SCALES = {"blockwise": 4 / 128, "mxfp8": 1 / 32, "tensorwise": 0.0}
"""Bytes of scales per element: a float32 for 128 elements of a token, a byte for 32."""
SCALES_OF_WEIGHTS = SCALES | {"blockwise": 4 / 128**2}
CAPABILITIES = {
    "blockwise": ((9, 0), (10, 0), "h100"),
    "mxfp8": ((10, 0), (11, 0), "b200"),
    "tensorwise": ((8, 9), (11, 0), "h100"),
}
"""The first compute capability with a recipe, the first without, and a card that has it."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Linear layers in the dtype of the model."""

    itemsize: int
    """Bytes of an element of the model's dtype."""

    @property
    def input_itemsize(self) -> float:
        """Bytes that a linear layer keeps of each element of its input."""
        return self.itemsize

    @property
    def expert_itemsize(self) -> float:
        """Bytes that experts keep of each element of a token."""
        return self.itemsize

    @property
    def weight_itemsize(self) -> float:
        """Bytes per element of an FP8 copy of a weight; 0 where products use the weight itself."""
        return 0.0

    def relative_time(self, card: GpuSpec) -> float:
        """Time of a linear layer's product, relative to bfloat16."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Fp8(Precision):
    """Linear layers in FP8: inputs and weights are rounded, with scales by the recipe.

    An input that stays in bfloat16 anyway is kept only once (Megatron's `save_original_input`): of
    the projection after attention, and of shared experts, whose input the router keeps.
    """

    recipe: str
    moves_tokens: bool
    """Whether experts' tokens move to the host: in FP8 with `mxfp8`, else in bfloat16."""

    @property
    def input_itemsize(self) -> float:
        return 1 + SCALES[self.recipe]

    @property
    def expert_itemsize(self) -> float:
        in_fp8 = self.recipe == "mxfp8" or not self.moves_tokens
        return self.input_itemsize if in_fp8 else self.itemsize

    @property
    def weight_itemsize(self) -> float:
        return 1 + SCALES_OF_WEIGHTS[self.recipe]

    def relative_time(self, card: GpuSpec) -> float:
        assert card.fp8_flops is not None, "see `check_fp8_card`"
        return card.flops / card.fp8_flops


def model_precision(cfg: Config) -> Precision:
    """Precision of linear layers outside of `fp8_layers`."""
    return Precision(itemsize=ITEMSIZE[cfg.model.dtype])


def precision(cfg: Config) -> Precision:
    """Precision of linear layers in `fp8_layers`."""
    if not has_fp8(cfg):
        return model_precision(cfg)
    return Fp8(
        itemsize=ITEMSIZE[cfg.model.dtype],
        recipe=_recipe(cfg),
        moves_tokens="expert_fc1" in cfg.model.megatron.get("offload_modules", ()),
    )


def has_fp8(cfg: Config) -> bool:
    """Whether linear layers multiply in FP8, except those outside of `fp8_layers`."""
    return bool(cfg.model.megatron.get("fp8"))


def _recipe(cfg: Config) -> str:
    recipe = cfg.model.megatron.get("fp8_recipe")
    if recipe not in SCALES:
        raise ValueError(
            f"model.megatron.fp8 needs model.megatron.fp8_recipe, one of {', '.join(SCALES)}"
        )
    return recipe


def check_fp8_card(cfg: Config, card: GpuSpec) -> None:
    """Raise ValueError if the card lacks the FP8 recipe of `cfg`, or layers do not support FP8."""
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


def fp8_layers(cfg: Config, num_layers: int) -> range:
    """The layers that `first_last_layers_bf16` leaves in FP8."""
    settings = cfg.model.megatron
    if not settings.get("first_last_layers_bf16"):
        return range(num_layers)
    first, last = (settings.get(f"num_layers_at_{end}_in_bf16", 1) for end in ("start", "end"))
    return range(first, num_layers - last)
