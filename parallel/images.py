"""Images in prompts: the positions that their tokens have in M-RoPE, and where features go.

A vision tower makes of an image a grid of features, each in the place of the embedding of one token
of the prompt. Index maths only; nothing here computes features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parallel.columns import ColumnMap


def prompt_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int, int]]
) -> Tensor:
    """The positions of the tokens of a prompt in time, height and width: [3, num_tokens] int64.

    The tokens of image i begin at ``starts[i]`` and are a grid of ``grids[i]`` tokens, row by row,
    which counts from the position after the text before it. Text has three equal positions, and
    goes on after the largest of an image: M-RoPE of Qwen2-VL (arXiv 2409.12191, section 2.1).
    """
    parts, at, position = [], 0, 0
    for start, (times, height, width) in zip(starts, grids, strict=True):
        parts.append(_text(position, start - at))
        position += start - at
        axes = (torch.arange(times), torch.arange(height), torch.arange(width))
        parts.append(torch.cartesian_prod(*axes).T + position)
        position += max(times, height, width)
        at = start + times * height * width
    return torch.cat([*parts, _text(position, num_tokens - at)], dim=1)


def _text(first: int, num_tokens: int) -> Tensor:
    return torch.arange(first, first + num_tokens).expand(3, -1)


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt, as a vision tower takes them, end to end; compared by `digest`."""

    # [patches, channels * frames * height * width] uint8; none on ranks without a vision tower
    patches: Tensor = field(compare=False)
    # [images, 3] int64, patches of each in time, height and width
    grids: Tensor = field(compare=False)
    digest: str  # of patches and grids: prompts with equal tokens may have other images
    tokens: Tensor = field(compare=False)  # [features] int64, ascending places in the prompt
    positions: Tensor = field(compare=False)  # [3, prompt tokens], see `prompt_positions`

    def positions_of(self, part: slice) -> Tensor:
        """The positions of a part of the prompt with its completion, which is text."""
        num_prompt_tokens = self.positions.shape[1]
        after = int(self.positions.max()) + 1
        completion = _text(after, max(0, part.stop - num_prompt_tokens))
        return torch.cat([self.positions, completion], dim=1)[:, part]


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """The images of a packed microbatch of T tokens, each once."""

    prompts: tuple[PromptImages, ...]  # on the host; none once features are computed or not needed
    rows: Tensor  # [T] int64, the feature in the place of each token; -1: its embedding stays
    positions: Tensor  # [3, T] int64, in M-RoPE; 0 in padding
    # Of each prompt [features, levels, hidden size], which others share; None: not computed yet.
    features: tuple[Tensor, ...] | None = None

    def to(self, device: torch.device | str) -> "PackedImages":
        """A copy with rows and positions on `device`: patches and features stay where they are."""
        return replace(self, rows=self.rows.to(device), positions=self.positions.to(device))


class Segment(Protocol):
    """A part of a prompt with its completion."""

    @property
    def part(self) -> slice:
        """Bounds of the part."""

    @property
    def images(self) -> PromptImages | None:
        """Images of the whole prompt."""


def pack_images(segments: Sequence[Segment], columns: ColumnMap) -> PackedImages | None:
    """The images of a microbatch of these segments, each once; None if there are none."""
    found = {each.images.digest: each.images for each in segments if each.images is not None}
    if not found:
        return None
    counts = (len(images.tokens) for images in found.values())
    first_rows = dict(zip(found, accumulate(counts, initial=0), strict=False))
    rows, positions = [], []
    for segment in segments:
        images, part = segment.images, segment.part
        numbers = torch.arange(part.start, part.stop)
        if images is None:
            rows.append(torch.full_like(numbers, -1))
            positions.append(numbers.expand(3, -1))
            continue
        # Of the whole prompt, at the place of each token of an image, its number among these.
        whole = torch.full((max(part.stop, images.positions.shape[1]),), -1)
        whole[images.tokens] = first_rows[images.digest] + torch.arange(len(images.tokens))
        rows.append(whole[part])
        positions.append(images.positions_of(part))
    return PackedImages(
        prompts=tuple(found.values()),
        rows=columns.column(rows, np.int64, -1),
        positions=torch.stack(
            [columns.column(axis, np.int64) for axis in zip(*positions, strict=True)]
        ),
    )
