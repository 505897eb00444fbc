"""Lengths of packed sequences and microbatches, which parallelism pads to multiples. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.dims import ParallelDims


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Multiples of packed lengths that context and sequence parallelism require, in tokens.

    Zigzag context parallelism cuts each sequence into 2 * cp equal chunks; sequence parallelism
    cuts what one context rank holds into tp equal parts. Products in FP8 need a multiple of tokens
    in each part. Nothing else needs padding.
    """

    sequence: int = 1  # every packed sequence length is a multiple of this
    total: int = 1  # every microbatch length is a multiple of this; a multiple of `sequence`
    context: int = 1  # ranks that split each sequence

    def __post_init__(self) -> None:
        assert self.total % self.sequence == 0

    @classmethod
    def for_mesh(
        cls, dims: ParallelDims, sequence_parallel: bool, multiple: int = 1
    ) -> "Alignment":
        """The smallest alignment that gives all ranks of `dims` equal parts, of a `multiple` of
        tokens."""
        sequence = 2 * dims.context if dims.context > 1 else 1
        parts = dims.context * (dims.tensor if sequence_parallel else 1)
        total = math.lcm(sequence, parts * multiple)
        return cls(sequence=sequence, total=total, context=dims.context)

    def for_context(self, size: int) -> "Alignment":
        """The alignment of microbatches that only `size` of the context ranks split: a divisor of
        their number."""
        if size == self.context:
            return self
        sequence = 2 * size if size > 1 else 1
        return Alignment(sequence=sequence, total=self.total // self.context * size, context=size)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def is_shared(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> bool:
    """Whether completions of these lengths, in one microbatch, share one copy of their prompt.

    Only if that saves tokens: each completion repeats the last token of the prompt, and is aligned
    separately.
    """
    alone = sum(round_up(num_prompt_tokens + response, multiple) for response in responses)
    return _shared_length(num_prompt_tokens, responses, multiple) < alone


def packed_length(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> int:
    """Tokens of completions of one prompt in one microbatch, alignment included."""
    alone = sum(round_up(num_prompt_tokens + response, multiple) for response in responses)
    return min(_shared_length(num_prompt_tokens, responses, multiple), alone)


def _shared_length(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> int:
    own = sum(round_up(1 + response, multiple) for response in responses)
    return round_up(num_prompt_tokens - 1, multiple) + own
