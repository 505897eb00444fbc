"""Lengths of packed sequences and microbatches, padded for parallelism. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.dims import ParallelDims


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Multiples of packed lengths that context and sequence parallelism require, in tokens.

    Zigzag context parallelism cuts each sequence into 2 * cp equal chunks; sequence parallelism
    cuts a context rank's tokens into tp equal parts. FP8 products need a multiple of tokens in each
    part. Nothing else needs padding.
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
        """Smallest alignment that gives ranks equal parts, each a multiple of `multiple` tokens."""
        sequence = 2 * dims.context if dims.context > 1 else 1
        parts = dims.context * (dims.tensor if sequence_parallel else 1)
        total = math.lcm(sequence, parts * multiple)
        return cls(sequence=sequence, total=total, context=dims.context)

    def for_context(self, size: int) -> "Alignment":
        """Alignment of microbatches split over `size` context ranks, a divisor of `context`."""
        if size == self.context:
            return self
        sequence = 2 * size if size > 1 else 1
        # `total` is a multiple of 2 * context, so the smaller total is a multiple of 2 * size.
        return Alignment(sequence=sequence, total=self.total // self.context * size, context=size)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def is_shared(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> bool:
    """Whether completions of these lengths share one copy of their prompt in a microbatch.

    They do if it saves tokens: each repeats the prompt's last token, and is aligned separately.
    """
    alone = sum(round_up(num_prompt_tokens + response, multiple) for response in responses)
    return _shared_length(num_prompt_tokens, responses, multiple) < alone


def packed_length(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> int:
    """Tokens of completions of one prompt in one microbatch, alignment included."""
    alone = sum(round_up(num_prompt_tokens + response, multiple) for response in responses)
    return min(_shared_length(num_prompt_tokens, responses, multiple), alone)


def _shared_length(num_prompt_tokens: int, responses: Sequence[int], multiple: int) -> int:
    # 1: the prompt's last token predicts the first response token, in the completion's own segment.
    own = sum(round_up(1 + response, multiple) for response in responses)
    return round_up(num_prompt_tokens - 1, multiple) + own
