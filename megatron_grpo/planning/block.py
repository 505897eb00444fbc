"""A module of a layer, asked for its bytes, operations and traffic; and how a rank computes it.

Kinds of modules are in `attention.py`, `linear_attention.py` and `mlp.py`; `layer_kinds.py` knows
which a layer has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.precision import Precision
from megatron_grpo.planning.workload import Computed
from parallel import ParallelDims


def uses_transformer_engine(cfg: Config) -> bool:
    """Whether layers on a GPU are Transformer Engine's, which requires 16-bit dtypes."""
    return ITEMSIZE[cfg.model.dtype] == 2 and cfg.model.megatron.get("transformer_impl") != "local"


def token_share(cfg: Config) -> float:
    """Fraction of the tokens that a tensor rank holds outside of its split matrices."""
    return 1 / cfg.dims.tensor if cfg.parallel.sequence_parallel else 1.0


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Elements of a token that softmax attention computes with, summed over heads."""

    num_heads: int
    query: int
    key: int
    value: int
    output: int
    are_fused: bool
    """Whether queries, keys and values are views of one projection's output."""

    @property
    def elements(self) -> int:
        return self.query + self.key + self.value + self.output


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How a rank computes layers: by Transformer Engine's kernels, whose documentation and source
    say what they keep for the backward."""

    dims: ParallelDims
    token_share: float
    precision: Precision
    fuses_rope: bool
    fuses_activation: bool

    fuses_norms: ClassVar[bool] = True
    """Whether the norm before a linear layer is a part of it."""

    @property
    def itemsize(self) -> int:
        return self.precision.itemsize

    @property
    def attention_itemsize(self) -> int:
        """Bytes of an element of queries, keys and values."""
        return self.itemsize

    def norm(self, width: float) -> float:
        """Bytes of an RMS norm over `width` elements: input, output, and a float32 for each row."""
        return 2 * self.itemsize * width + 4

    def attention(self, heads: Heads) -> float:
        """Queries, keys, values, output and a float32 per row and head, over all tensor ranks.

        Keys of other context ranks are passed around a ring.
        """
        return self.itemsize * heads.elements + 4 * heads.num_heads

    def activation(self, has_gates: bool) -> float:
        """Bytes of an MLP per intermediate element: with gates both halves, and their product.

        Without fusion, also the activated half and another copy of the other half. Without gates
        what is above 0, and its square.
        """
        if not has_gates:
            return self.itemsize + self.precision.input_itemsize
        return self.itemsize * (2 if self.fuses_activation else 4) + self.precision.input_itemsize

    @property
    def less_of_inputs(self) -> float:
        """Bytes that a linear layer keeps less of an element of its input than in `itemsize`."""
        return self.itemsize - self.precision.input_itemsize


@dataclass(frozen=True, kw_only=True)
class TorchKernels(Kernels):
    """Torch's kernels, of CPUs, float32 and `transformer_impl: local`, by measurement."""

    fuses_norms = False

    @property
    def attention_itemsize(self) -> int:
        return 4

    def norm(self, width: float) -> float:
        """The input and the normalized input in float32."""
        return (8 + self.itemsize) * width + 4

    def attention(self, heads: Heads) -> float:
        """In float32, with the keys of all context ranks, and the output in the model's dtype.

        Values are padded to the size of keys.
        """
        context, extra = self.dims.context, 0.0
        if heads.are_fused and self.itemsize == 4 and context == 1:
            extra = heads.query + heads.key  # a view keeps all of the projection
        elif heads.value < heads.key and context > 1:
            # Each of a rank's two chunks of a sequence has padded values of its own; together they
            # attend to all of the sequence and to one chunk again: half a rank's tokens.
            extra = heads.key / 2
        inner = 4 * (2 * heads.query + 2 * heads.key * context + extra)
        return inner + 4 * heads.num_heads + self.itemsize * heads.output


def kernels_of(cfg: Config, precision: Precision) -> Kernels:
    """Kernels of layers whose linear layers have this precision."""
    settings, is_fused = cfg.model.megatron, uses_transformer_engine(cfg)
    kind = Kernels if is_fused else TorchKernels
    return kind(
        dims=cfg.dims,
        token_share=token_share(cfg),
        precision=precision,
        # `policy.transformer` turns both on for Transformer Engine's layers.
        fuses_rope=bool(settings.get("apply_rope_fusion", is_fused)),
        fuses_activation=bool(settings.get("bias_activation_fusion", is_fused)),
    )


class Saved(NamedTuple):
    """Bytes per token of a context rank that a part of a module keeps for its backward."""

    num_bytes: float
    entry: float = 0.0
    """Its inputs and output, which are kept also if it is recomputed."""


class Weights(NamedTuple):
    """Weights of a part of a module that a token is multiplied with."""

    part: str
    size: float
    is_linear: bool = True
    """Whether a linear layer multiplies by them, in its `Precision`."""


PASSES, FROZEN_PASSES = 3, 2
"""Forwards that a forward and a backward cost. A backward costs two (Kaplan et al., arXiv
2001.08361): for the gradients of inputs, and those of weights, which frozen ones have not."""


class Flops(NamedTuple):
    """Operations of a part of a module in a forward."""

    part: str
    forward: float
    passes: int = PASSES
    frozen_passes: int = FROZEN_PASSES


@dataclass(frozen=True)
class Block:
    """A module of a layer with its norms: what it computes, keeps and sends for each token.

    Parts have Megatron-Core's names for `recompute_modules`, if it has one for them. Figures are of
    one layer.
    """

    shape: ModelShape

    has_own_norm: ClassVar[bool] = False
    """Whether no linear layer can fuse the norm before it: Megatron can recompute its output."""
    attainable: ClassVar[float] = 0.5
    """Fraction of the peak rate, for layers alone; Megatron-LM reaches 0.41 to 0.48 including all
    waits.

    In FP8 the same of each operation's own peak. For Llama-3-70B on 64 H100 (TP4 PP8 VP5, 8,192
    tokens, scales of tensors) that is 12.2 s for 128 sequences; Megatron-Bridge reports 9.8 to
    10.2. Scales of blocks take more time, and for them, or for experts, no such figure has been
    found.
    """
    repeats: ClassVar[Mapping[str, str]]
    """Purposes for which ranks exchange, and the part whose recomputation repeats that."""

    def weights(self) -> Iterator[Weights]:
        """Weights that a token is multiplied with, without those of norms."""
        raise NotImplementedError

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        """Operations without weights."""
        yield from ()

    def flops(self, work: Computed, of_linear: float = 1.0) -> Iterator[Flops]:
        """Operations: two for each weight and token, those of linear layers times `of_linear`; and
        others."""
        for part, size, is_linear in self.weights():
            yield Flops(part, 2.0 * size * work.tokens * (of_linear if is_linear else 1.0))
        yield from self.other_flops(work)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        """Bytes that each part keeps for its backward, norms included."""
        share, width = kernels.token_share, self.shape.hidden_size
        norms = (self.shape.has_pre_norms + self.shape.has_post_norms) * kernels.norm(width)
        output = 0.0
        if self.has_own_norm or not kernels.fuses_norms:
            output = kernels.itemsize * width
        else:  # kept by the linear layer that it is a part of
            norms -= kernels.less_of_inputs * width
        return {"layernorm": Saved(output * share), "norms": Saved((norms - output) * share)}

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        """Bytes that each of `offload_modules` moves to the host."""
        return {}

    def working_bytes(self, cfg: Config, device: str, *, backward: bool) -> int:
        """Peak bytes on a rank beside what is kept, in a forward or with the backward after it;
        `device` is `cpu` or `cuda`."""
        return 0

    @property
    def gathered(self) -> tuple[int, int]:
        """Elements that tensor ranks gather for split matrices, and for anything else."""
        return self.shape.hidden_size, 0

    def tensor_elements(self, forwards: float) -> float:
        """Elements that tensor ranks exchange in forwards and a backward.

        They all-gather the inputs of split matrices, and reduce-scatter what these add to hidden
        states. A backward does both for gradients, and gathers the inputs once more for those of
        weights.
        """
        inputs, others = self.gathered
        return (forwards + 1) * (inputs + others + self.shape.hidden_size) + inputs

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """Elements that context ranks exchange in forwards and a backward, over tensor ranks.

        `others`: tokens of other ranks for each of a rank's own; `is_ring`: whether ranks pass keys
        and values around, and not tokens for heads.
        """
        raise NotImplementedError

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        """Operations of an engine without weights: for tokens that it generates, those of prompts,
        and the pairs of tokens that attend."""
        return 0.0

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """Bytes of a token in the cache of each of an engine's `tensor` workers."""
        return 0

    def sequence_bytes(self, itemsize: int, num_drafted: int) -> int:
        """Bytes of a sequence that an engine keeps, over its workers, whatever its length is; it
        drafts so many tokens."""
        return 0

    def _norm_without_input(self, kernels: Kernels) -> float:
        width = self.shape.hidden_size
        return (kernels.norm(width) - kernels.itemsize * width) * kernels.token_share
