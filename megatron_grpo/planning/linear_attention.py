"""Linear attention: the gated delta rule, and Mamba-2; both in chunks of tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from checkpoint_convert.shape import LinearShape
from megatron_grpo.planning.block import PASSES, Block, Flops, Kernels, Saved, Weights
from megatron_grpo.planning.workload import Computed

CHUNK = 64
"""Tokens of a chunk, as in `parallel.delta_rule`; that imports torch, which takes seconds."""


@dataclass(frozen=True)
class LinearAttention(Block):
    """Linear attention: each head keeps one matrix, the memory, for all previous tokens."""

    repeats: ClassVar[Mapping[str, str]] = {"tensor": "attention", "linear attention": "delta_rule"}

    @property
    def linear(self) -> LinearShape:
        assert self.shape.linear is not None
        return self.shape.linear

    @property
    def values(self) -> int:
        """Elements of a token's values, over all heads."""
        return self.linear.num_value_heads * self.linear.value_dim

    def weights(self) -> Iterator[Weights]:
        linear, hidden = self.linear, self.shape.hidden_size
        yield Weights("attention", hidden * (linear.projected_dim + self.values))
        convolution = linear.kernel_size * linear.num_key_heads * linear.mixed_dim
        yield Weights("attention", convolution, is_linear=False)

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        yield Flops("delta_rule", self.rule_flops() * work.tokens, frozen_passes=PASSES)

    def rule_flops(self, chunk: int = CHUNK) -> float:
        """Operations per token without projections and convolution; decoding has chunks of 1."""
        raise NotImplementedError

    def kept_elements(self) -> float:
        """Float32 elements per token that autograd saves between the two projections.

        Counts `policy.linear_attention` on whole chunks, without indices. The kernels of
        `parallel.linear_kernels` recompute most of them, but a plan cannot know if a run has them.
        """
        raise NotImplementedError

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        kept = 4 * self.kept_elements() + kernels.precision.input_itemsize * self.values
        return super().saved(kernels) | {"linear attention": Saved(kept / kernels.dims.tensor)}

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        return {"attn_norm": self._norm_without_input(kernels)}

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """All-to-all from whole tokens to whole heads and back: the output of the first projection,
        and the input of the last."""
        elements = self.linear.projected_dim + self.values
        return (forwards + 1) * elements * others / (others + 1)

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        return self.rule_flops(chunk=1) * tokens + self.rule_flops() * prompt_tokens

    def sequence_bytes(self, itemsize: int, num_drafted: int) -> int:
        """The convolution's last inputs, and the memory in float32.

        With drafts vLLM keeps both once more for each drafted token, which is an input as well.
        """
        linear = self.linear
        mixed = linear.num_key_heads * linear.mixed_dim
        tokens = (linear.kernel_size - 1 + num_drafted) * mixed
        memory = self.values * linear.key_dim
        return (1 + num_drafted) * (itemsize * tokens + 4 * memory)


@dataclass(frozen=True)
class DeltaRule(LinearAttention):
    """Gated DeltaNet (arXiv 2412.06464)."""

    def rule_flops(self, chunk: int = CHUNK) -> float:
        """Operations per token in chunks of C tokens (section 3.3).

        For each head with keys of k and values of v elements:

        - 4 C k: key and query with the chunk's keys;
        - 6 k v: recall from the memory, the query's read, the update;
        - 2 C v: the query's weights with changes of values;
        - C (k + v): the triangular system, with k + v right-hand sides.
        """
        key, value = self.linear.key_dim, self.linear.value_dim
        return self.linear.num_value_heads * (chunk * (5 * key + 3 * value) + 6.0 * key * value)

    def kept_elements(self) -> float:
        linear = self.linear
        key, value = linear.key_dim, linear.value_dim
        # Factors of the convolution, input and output of the activation after it; inverse lengths
        # of queries and keys.
        convolution = linear.num_key_heads * ((linear.kernel_size + 2) * linear.mixed_dim + 2)
        # Decays and strengths with their inputs; the inverse length of the output.
        rates = 8
        # Products of keys and of queries with keys, decays between two tokens, and the system.
        pairs = 6 * CHUNK
        keys = 7 * key  # queries and keys, plain and with decays, and in the order of steps
        values = 8 * value  # values, their changes, the output, its norm and its gate
        memory = key * value / CHUNK  # before each chunk
        return convolution + linear.num_value_heads * (rates + pairs + keys + values + memory)


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """Mamba-2 (arXiv 2405.21060)."""

    def rule_flops(self, chunk: int = CHUNK) -> float:
        """`DeltaRule` without recall and triangular system (section 6); heads of a group share the
        products of queries and keys."""
        linear = self.linear
        key, value = linear.key_dim, linear.value_dim
        of_heads = linear.num_value_heads * (2 * chunk * value + 4.0 * key * value)
        return of_heads + 2.0 * linear.num_key_heads * chunk * key

    def kept_elements(self) -> float:
        linear = self.linear
        groups, heads, value = linear.num_key_heads, linear.num_value_heads, linear.value_dim
        # Output of the projection, factors of the convolution, and the input of its activation.
        mixed = linear.projected_dim + groups * (linear.kernel_size + 1) * linear.mixed_dim
        # Products of queries with keys, these with decays, and decays between two tokens.
        pairs = CHUNK * (groups + 2 * heads)
        # Queries and keys; and the inverse length of the output.
        of_groups = groups * (2 * linear.key_dim + 1)
        # Steps and decays; x, values, the output, its norm and its gate; and memories.
        of_heads = heads * (4 + 8 * value + (2 * linear.key_dim + 1) * value / CHUNK)
        return mixed + pairs + of_groups + of_heads
