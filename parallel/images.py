"""Images in prompts: M-RoPE positions of their tokens, and the places of their features.

A vision tower turns an image into a grid of features; each replaces the embedding of one token of
the prompt. Index maths only; nothing here computes features.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


def prompt_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Positions of a prompt's tokens in time, height and width: int64 [3, num_tokens].

    Image i is a grid of ``grids[i]`` tokens from token ``starts[i]``, row by row, and counts from
    the position after the text before it. Text has three equal positions, and goes on after an
    image's largest one: M-RoPE of Qwen2-VL (arXiv 2409.12191, section 2.1). Two tokens of text, an
    image of (1, 2, 2) and one token have the heights 0 1 2 2 3 3 4.
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


class Images(Protocol):
    """Images of a sequence: `PromptImages`, or their sources until they are read."""

    def within(self, num_tokens: int) -> tuple[Hashable, ...]:
        """Identify the images that begin in the first `num_tokens` of the sequence."""


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of a prompt, and those that an agent shows later, as a vision tower takes them,
    end to end; compared by `digests`."""

    # [patches, channels * frames * height * width] uint8; none on ranks without a vision tower
    patches: Tensor = field(compare=False)
    # [images, 3] int64, patches of each in time, height and width
    grids: Tensor = field(compare=False)
    digests: tuple[str, ...]  # hash of each image: equal tokens may be of other images
    tokens: Tensor = field(compare=False)  # [features] int64, ascending places in the sequence
    positions: Tensor = field(compare=False)  # [3, tokens up to the last image], `prompt_positions`

    def within(self, num_tokens: int) -> tuple[str, ...]:
        """Digests of the images that begin in the first `num_tokens` of the sequence."""
        sizes = self.grids.prod(dim=1)
        counts = sizes * len(self.tokens) // sizes.sum()  # of features
        starts = self.tokens[counts.cumsum(dim=0) - counts]
        return self.digests[: int((starts < num_tokens).sum())]

    def positions_of(self, part: slice) -> Tensor:
        """Positions [3, part] in the sequence; all tokens behind the last image are text."""
        after = int(self.positions.max()) + 1
        text = _text(after, max(0, part.stop - self.positions.shape[1]))
        return torch.cat([self.positions, text], dim=1)[:, part]


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """The images of a packed microbatch of T tokens, each once."""

    prompts: tuple[PromptImages, ...]  # on the host; none once features are computed or not needed
    rows: Tensor  # [T] int64, feature that replaces each token's embedding; -1: none does
    positions: Tensor  # [3, T] int64, in M-RoPE; 0 in padding
    # Features of each prompt [features, levels, hidden size]; microbatches share them. None: not
    # computed yet.
    features: tuple[Tensor, ...] | None = None

    def to(self, device: torch.device | str) -> "PackedImages":
        """A copy with rows and positions on `device`: patches and features stay where they are."""
        return replace(self, rows=self.rows.to(device), positions=self.positions.to(device))
