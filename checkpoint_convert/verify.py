"""Compares two sets of weights, tensor by tensor, across formats: `checkpoint-convert verify`."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES
from checkpoint_convert.formats.tensor_io import is_finite
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import hf_tensors
from checkpoint_convert.quantized.numbers import DequantizedTensors
from checkpoint_convert.shape import differing_fields
from checkpoint_convert.sidecar import own_shape
from checkpoint_convert.transfer import PART_BYTES, SHARE_BYTES, add_bytes, run_tasks
from checkpoint_convert.weights import Progress, ShardLoader, Weights, in_groups, open_weights
from parallel import Layout, ShardMapping

_MAX_ELEMENTS = PART_BYTES // 8  # differences are computed in float64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How the two versions of a tensor differ."""

    tensor: str
    dtypes: tuple[torch.dtype, torch.dtype]
    num_different: int
    are_finite: bool
    """Whether all values of both versions are finite."""
    num_elements: int
    largest: float
    """Largest absolute difference; NaN if any difference is undefined."""

    def __str__(self) -> str:
        both = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        if self.num_different == 0 and not self.are_finite:
            return f"{self.tensor}: {both}, equal, with values that are not finite"
        if self.num_different == 0:
            return f"{self.tensor}: {both}, equal in value"
        return (
            f"{self.tensor}: {self.num_different:,} of {self.num_elements:,} elements differ, "
            f"by {self.largest:.3g} at most" + f" ({both})" * (self.dtypes[0] != self.dtypes[1])
        )


def verify_weights(
    a: Path,
    b: Path,
    *,
    tolerance: float | None = None,
    hf_config: Path | None = None,
    num_workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[str | Difference]:
    """The differences between the models `a` and `b`, in any of the formats of `open_weights`.

    Strings name config fields that make equal weights compute different things.

    Without `tolerance`, tensors are equal if their bytes and dtypes are; a matrix that one side
    alone has quantised is equal if the other side's values round to the same numbers under its
    scales. With `tolerance`, tensors are equal if no element differs by more. Values that are not
    finite are always reported, even when equal. Each side is read by its own config; a side without
    one uses `hf_config`, or else the config of the other side. Raises ValueError when a side is not
    a complete set of weights, or when the two models have different tensors.
    """
    with ExitStack() as stack:
        sides = _open_both(stack, a, b, hf_config)
        parts = Layout.of_parts(hf_tensors(sides[0].shape), _MAX_ELEMENTS)
        loaders = [ShardLoader(side.tensors, side.layout, parts) for side in sides]
        dtypes = [side.dtypes for side in sides]

        def size_of(part: ShardMapping) -> int:
            return part.box.num_elements * ITEM_SIZES[dtypes[0][part.tensor]]

        def compare_part(part: ShardMapping) -> Difference:
            a, b = (torch.empty(part.box.size, dtype=DTYPES[of[part.tensor]]) for of in dtypes)
            for loader, values in zip(loaders, (a, b), strict=True):
                loader.fill(part.local, values)
            add_bytes(a.nbytes)
            if tolerance is None:
                a, b = _stored_alike(part, sides, a, b)
            return compare(part.tensor, a, b, tolerance)

        num_bytes = sum(map(size_of, parts.pieces))
        compared = run_tasks(
            lambda share: [compare_part(part) for part in share],
            list(in_groups(parts.pieces, size_of, SHARE_BYTES)),
            num_workers,
            lambda done: progress(done, num_bytes),
        )
        fields = differing_fields(sides[0].shape, sides[1].shape)
        configs = [f"config: {field}" for field in fields]
        return [*configs, *_merged(chain.from_iterable(compared), tolerance)]


def _stored_alike(
    part: ShardMapping, sides: Sequence[Weights], a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Values of both sides; if one side alone is quantised, the other is rounded as it would be."""
    match [_quantized(side, part.tensor) for side in sides]:
        case [DequantizedTensors() as tensors, None]:
            b = tensors.as_stored(part.tensor, part.box, b)
        case [None, DequantizedTensors() as tensors]:
            a = tensors.as_stored(part.tensor, part.box, a)
        case _:
            return a, b
    # NVFP4 keeps the sign of a negative value that rounds to zero, but not of -0. `+ 0.0` drops it.
    return (a + 0.0, b + 0.0) if tensors.scheme(part.tensor).whole else (a, b)


def _quantized(side: Weights, name: str) -> DequantizedTensors | None:
    """The tensors of a side that stores this one as numbers with scales, else None."""
    tensors = side.tensors
    if isinstance(tensors, DequantizedTensors) and tensors.is_quantized(name):
        return tensors
    return None


def compare(name: str, a: Tensor, b: Tensor, tolerance: float | None) -> Difference:
    """Compare two tensors of the same shape, by their bytes or within a tolerance."""
    # Compared as integers, -0 differs from 0, and NaN equals NaN.
    if a.dtype == b.dtype:
        same = a.view(_INTEGERS[a.itemsize]) == b.view(_INTEGERS[b.itemsize])
    else:
        same = a.double() == b.double()
    num_different, largest = 0, 0.0
    if not same.all():
        # 0 where values are equal: the difference of two infinities is NaN.
        gaps = torch.where(same, 0.0, (a.double() - b.double()).abs())
        within = same if tolerance is None else gaps <= tolerance  # NaN exceeds any tolerance
        num_different, largest = int((~within).sum()), float(gaps.max())
    return Difference(
        tensor=name,
        dtypes=(a.dtype, b.dtype),
        num_different=num_different,
        are_finite=is_finite(a) and is_finite(b),
        num_elements=a.numel(),
        largest=largest,
    )


def _merged(parts: Iterable[Difference], tolerance: float | None) -> list[Difference]:
    """One entry per tensor that differs, merged from the entries of its parts."""
    tensors: dict[str, Difference] = {}
    for part in parts:
        whole = tensors.setdefault(part.tensor, part)
        if whole is not part:
            tensors[part.tensor] = replace(
                whole,
                num_different=whole.num_different + part.num_different,
                are_finite=whole.are_finite and part.are_finite,
                num_elements=whole.num_elements + part.num_elements,
                # NaN compares as false: `max` alone would keep or drop it by its position.
                largest=max(whole.largest, part.largest, key=lambda gap: (isnan(gap), gap)),
            )
    return [
        tensor
        for tensor in tensors.values()
        if tensor.num_different
        or not tensor.are_finite
        or (tolerance is None and tensor.dtypes[0] != tensor.dtypes[1])
    ]


def _open_both(
    stack: ExitStack, a: Path, b: Path, hf_config: Path | None
) -> tuple[Weights, Weights]:
    """Open both sides; ValueError unless both models have the same tensors."""
    named = [own_shape(path) for path in (a, b)]
    given = read_shape(hf_config) if hf_config else next(filter(None, named), None)
    if given is None:
        raise ValueError(f"neither {a} nor {b} says which model it is: give --hf-config")
    first, second = shapes = [own or given for own in named]
    if hf_tensors(first) != hf_tensors(second):
        differing = [f"family: {first.family}, {second.family}", *differing_fields(first, second)]
        raise ValueError(f"{a} and {b} are different models:\n  " + "\n  ".join(differing))
    opened = [
        stack.enter_context(closing(open_weights(path, shape)))
        for path, shape in zip((a, b), shapes, strict=True)
    ]
    # If one side has trained its MTP layer or vision tower, the other side's is compared as well.
    mtp = any(side.shape.trains_mtp for side in opened)
    vision = max(opened, key=lambda side: len(side.shape.vision)).shape.vision
    if mtp or vision:
        wanted = [replace(shape, trains_mtp=mtp, vision=vision) for shape in shapes]
        opened = [
            stack.enter_context(closing(open_weights(path, shape)))
            for path, shape in zip((a, b), wanted, strict=True)
        ]
        if hf_tensors(opened[0].shape) != hf_tensors(opened[1].shape):
            raise ValueError(
                f"{a} and {b} are different models: only one was trained with its "
                + ("vision tower" if vision else "layer for multi-token prediction")
            )
    for side in opened:
        side.tensors.must_be_finite = False  # such values are compared, and reported
    return opened[0], opened[1]
