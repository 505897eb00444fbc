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
    """Attention by a matrix of each head that remembers all tokens before."""

    repeats: ClassVar[Mapping[str, str]] = {"tensor": "attention", "linear attention": "delta_rule"}

    @property
    def linear(self) -> LinearShape:
        assert self.shape.linear is not None
        return self.shape.linear

    @property
    def values(self) -> int:
        """Elements of a token's values, of all heads."""
        return self.linear.num_value_heads * self.linear.value_dim

    def weights(self) -> Iterator[Weights]:
        linear, hidden = self.linear, self.shape.hidden_size
        yield Weights("attention", hidden * (linear.projected_dim + self.values))
        convolution = linear.kernel_size * linear.num_key_heads * linear.mixed_dim
        yield Weights("attention", convolution, is_linear=False)

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        yield Flops("delta_rule", self.rule_flops() * work.tokens, frozen_passes=PASSES)

    def rule_flops(self, chunk: int = CHUNK) -> float:
        """Operations of a token without projections and convolution; engines generate in chunks of
        one token."""
        raise NotImplementedError

    def kept_elements(self) -> float:
        """Float32 elements that autograd saves of a token between the two projections.

        Of `policy.linear_attention`, for sequences of whole chunks, without indices. Kernels
        (`parallel.linear_kernels`) compute most of them again; whether a run has them is not known
        here.
        """
        raise NotImplementedError

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        kept = 4 * self.kept_elements() + kernels.precision.input_itemsize * self.values
        return super().saved(kernels) | {"linear attention": Saved(kept / kernels.dims.tensor)}

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        return {"attn_norm": self._norm_without_input(kernels)}

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """A rank has whole tokens before and after, and whole heads in between: it sends what the
        projection gives, and what goes into that of the output."""
        elements = self.linear.projected_dim + self.values
        return (forwards + 1) * elements * others / (others + 1)

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        return self.rule_flops(chunk=1) * tokens + self.rule_flops() * prompt_tokens

    def sequence_bytes(self, itemsize: int, num_drafted: int) -> int:
        """Inputs of the convolution of the last tokens, and the memory in float32.

        With drafts vLLM keeps both once more for each of their tokens, and these tokens with the
        last ones.
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
        """In chunks of C tokens (section 3.3), a head with keys of size k and values of size v
        multiplies, per token: its key and its query with the keys of the chunk, 4 C k; what its key
        recalls of the memory, what its query reads there, and what it adds to it, 6 k v; and the
        weights of its query with changes of values, 2 C v. The triangular system has k + v
        right-hand sides, C (k + v)."""
        key, value = self.linear.key_dim, self.linear.value_dim
        return self.linear.num_value_heads * (chunk * (5 * key + 3 * value) + 6.0 * key * value)

    def kept_elements(self) -> float:
        linear = self.linear
        key, value = linear.key_dim, linear.value_dim
        # What the convolution multiplies, and the input and output of the activation after it; the
        # inverse lengths of queries and keys.
        convolution = linear.num_key_heads * ((linear.kernel_size + 2) * linear.mixed_dim + 2)
        # Decays and strengths, and what they are computed of; the inverse length of the output.
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
        """As `DeltaRule`, but for what a key recalls and the system (section 6); queries meet keys
        once for all heads of a group."""
        linear = self.linear
        key, value = linear.key_dim, linear.value_dim
        of_heads = linear.num_value_heads * (2 * chunk * value + 4.0 * key * value)
        return of_heads + 2.0 * linear.num_key_heads * chunk * key

    def kept_elements(self) -> float:
        linear = self.linear
        groups, heads, value = linear.num_key_heads, linear.num_value_heads, linear.value_dim
        # What the projection gives, what the convolution multiplies, and the input of its
        # activation.
        mixed = linear.projected_dim + groups * (linear.kernel_size + 1) * linear.mixed_dim
        # Products of queries with keys, these with decays, and decays between two tokens.
        pairs = CHUNK * (groups + 2 * heads)
        # Queries and keys; and the inverse length of the output.
        of_groups = groups * (2 * linear.key_dim + 1)
        # Steps and decays; x, values, the output, its norm and its gate; and memories.
        of_heads = heads * (4 + 8 * value + (2 * linear.key_dim + 1) * value / CHUNK)
        return mixed + pairs + of_groups + of_heads
