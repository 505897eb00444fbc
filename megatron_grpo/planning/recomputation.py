"""Which parts of which layers run their forward a second time, in the backward."""

from collections.abc import Sequence

from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import DEFAULT_MODULES

PARTS = frozenset({"attention", "core_attn", "layernorm", "mlp", "moe", "shared_experts"})
"""The parts of a layer, by Megatron-Core's names for `recompute_modules`; those that it lacks have
no operations that count (`moe_act`) or are refused by the trainer (`mla_up_proj`). `attention` is
all of it but `core_attn`, and only full recomputation repeats it."""


def recomputed_parts(cfg: Config) -> frozenset[str]:
    """The parts that a layer of `recomputed_layers` recomputes."""
    settings = cfg.model.megatron
    match settings.get("recompute_granularity"):
        case "full":
            return PARTS
        case "selective":
            modules = frozenset(settings.get("recompute_modules") or DEFAULT_MODULES)
            return modules | {"shared_experts"} if "moe" in modules else modules
    return frozenset()


def recomputed_layers(cfg: Config, chunks: Sequence[range]) -> list[range]:
    """The layers of model chunks that recompute: with `recompute_method: block` the first ones."""
    settings = cfg.model.megatron
    chosen = settings.get("recompute_granularity"), settings.get("recompute_method")
    if chosen == ("full", "block"):
        return [chunk[: settings.get("recompute_num_layers") or 0] for chunk in chunks]
    return list(chunks)
