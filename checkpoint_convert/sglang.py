"""Which parts of a model each worker of an SGLang engine holds (0.5.23).

SGLang's layers come from vLLM's: the same parts, fused and padded alike, under other names in a few
places.
"""

from collections.abc import Mapping
from dataclasses import replace

from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import EngineDims, engine_dtypes, engine_layouts
from parallel import Layout

_NAMES = {".experts.routed_experts.": ".experts."}
"""Parts of names of parameters: vLLM's, and SGLang's."""


def sglang_layouts(shape: ModelShape, dims: EngineDims) -> list[Layout]:
    """What each worker of one engine holds, as `engine_layouts` has it of vLLM's."""
    return [_renamed(layout) for layout in engine_layouts(shape, dims)]


def sglang_dtypes(shape: ModelShape, dtype: str) -> dict[str, str]:
    """The dtype of every parameter of an engine of `dtype`, by name."""
    return {_name(name): found for name, found in engine_dtypes(shape, dtype).items()}


def _renamed(layout: Layout) -> Layout:
    shapes: Mapping[str, tuple[int, ...]] = {_name(n): size for n, size in layout.shapes.items()}
    pieces = tuple(replace(piece, local=_name(piece.local)) for piece in layout.pieces)
    return Layout(shapes, pieces, tuple((_name(name), box) for name, box in layout.zeros))


def _name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
