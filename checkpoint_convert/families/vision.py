"""The vision tower of Qwen2.5-VL and Qwen3-VL, if it is trained; names are those of its module.

Every rank of the first pipeline stage holds all of it; the workers of an engine split it.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from checkpoint_convert.families.description import InVllm, Parameter, Tensor, in_one_tensor
from parallel import Shape

VISION = "visual."
"""Prefix of its tensors, in engines too; some weight files have `model.` in front."""

_GATE_OR_UP = re.compile(r"\.(gate|up)_proj\.")
_SPLIT = {
    0: re.compile(r"\.(qkv|gate_up_proj|linear_fc1|merger\.mlp\.0)\."),
    1: re.compile(r"\.(attn\.proj|down_proj|linear_fc2|merger\.mlp\.2)\.weight"),
}
"""Parameters that vLLM's workers split, by dimension."""


def vision_tower(
    tensors: Sequence[tuple[str, Shape]], *, in_engine: bool = False
) -> list[Parameter]:
    """Parameters of the first pipeline stage, or of an engine, which fuses gate and up."""
    sources: dict[str, list[Tensor]] = {}
    for name, shape in tensors:
        own = _GATE_OR_UP.sub(".gate_up_proj.", name) if in_engine else name
        sources.setdefault(own, []).extend(_parts(name, shape))
    return [
        Parameter(
            name,
            tuple(parts),
            vllm=InVllm(
                name=name,
                split=next((dim for dim, names in _SPLIT.items() if names.search(name)), None),
            ),
        )
        for name, parts in sources.items()
    ]


def _parts(name: str, shape: Shape) -> Sequence[Tensor]:
    """The parts of a tensor that workers split separately: queries, keys and values."""
    if ".qkv." not in name:
        return [Tensor(name, shape)]
    return in_one_tensor(name, [Tensor(name, (shape[0] // 3, *shape[1:]))] * 3)


@cache
def vision_tensors(folder: Path) -> tuple[tuple[str, Shape], ...]:
    """Name and shape of each tensor of the tower that config.json in `folder` describes."""
    # torch and transformers take seconds to import, and only runs with images need them.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    with torch.device("meta"):
        tower = AutoModel.from_config(AutoConfig.from_pretrained(folder).vision_config)
    return tuple((VISION + name, tuple(each.shape)) for name, each in tower.named_parameters())
