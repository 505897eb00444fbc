"""`Block`: bytes, operations and traffic of a layer's module. `Kernels`: how a rank computes it.

Subclasses are in `attention.py`, `linear_attention.py` and `mlp.py`; `layer_kinds.py` chooses the
blocks of a layer.
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
    """Bytes that Transformer Engine's kernels keep for the backward, by its source."""

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

        Keys of other context ranks travel around a ring and are not kept.
        """
        return self.itemsize * heads.elements + 4 * heads.num_heads

    def activation(self, has_gates: bool) -> float:
        """Bytes of an MLP per intermediate element.

        With gates: both halves and their product; without fusion also the activated half and a copy
        of the other. Without gates (squared ReLU): the part above 0, and its square.
        """
        if not has_gates:
            return self.itemsize + self.precision.input_itemsize
        return self.itemsize * (2 if self.fuses_activation else 4) + self.precision.input_itemsize

    @property
    def less_of_inputs(self) -> float:
        """Bytes per element of its input that a linear layer saves; 0 without FP8."""
        return self.itemsize - self.precision.input_itemsize


@dataclass(frozen=True, kw_only=True)
class TorchKernels(Kernels):
    """Measured bytes of torch's kernels: for CPUs, float32 and `transformer_impl: local`."""

    fuses_norms = False

    @property
    def attention_itemsize(self) -> int:
        return 4

    def norm(self, width: float) -> float:
        """The input, the normalized input in float32, and a float32 for each row."""
        return (8 + self.itemsize) * width + 4

    def attention(self, heads: Heads) -> float:
        """In float32, with the keys of all context ranks, and the output in the model's dtype.

        Values are padded to the size of keys.
        """
        context, extra = self.dims.context, 0.0
        if heads.are_fused and self.itemsize == 4 and context == 1:
            extra = heads.query + heads.key  # a view keeps all of the projection
        elif heads.value < heads.key and context > 1:
            # A rank's chunks r and 2C-1-r each pad the values up to themselves: 2C + 1 of the 2C
            # chunks together, so half a rank's tokens twice.
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
    """Inputs and output, which stay when the part is recomputed."""


class Weights(NamedTuple):
    """Weights of a part of a module that a token is multiplied with."""

    part: str
    size: float
    is_linear: bool = True
    """Whether a linear layer multiplies by them: in FP8 with `model.megatron.fp8`."""


PASSES, FROZEN_PASSES = 3, 2
"""Cost of a forward with its backward, in forwards. The backward costs one for the gradients of
inputs and one for the gradients of trained weights (Kaplan et al., arXiv 2001.08361)."""


class Flops(NamedTuple):
    """Operations of a part of a module in a forward."""

    part: str
    forward: float
    passes: int = PASSES
    frozen_passes: int = FROZEN_PASSES


@dataclass(frozen=True)
class Block:
    """A module of a layer with its norms: what it computes, keeps and sends for each token.

    Parts are named as in Megatron-Core's `recompute_modules`, if it has them. Figures are of one
    layer.
    """

    shape: ModelShape

    has_own_norm: ClassVar[bool] = False
    """Whether the norm before the module is never fused: Megatron can recompute its output."""
    attainable: ClassVar[float] = 0.5
    """Fraction of the peak rate that layers reach; Megatron-LM reports 0.41 to 0.48 with all waits.

    The same fraction of the FP8 peak gives 12.2 s for Llama-3-70B on 64 H100 (TP4 PP8 VP5, 128
    sequences of 8,192 tokens, scales of tensors), and Megatron-Bridge reports 9.8 to 10.2. Scales
    of blocks are slower; no published figure was found for them, or for experts in FP8.
    """
    repeats: ClassVar[Mapping[str, str]]
    """Exchanges, with the part whose recomputation repeats each: {"tensor": "mlp"}."""

    def weights(self) -> Iterator[Weights]:
        """Weights that a token is multiplied with, norms excluded."""
        raise NotImplementedError

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        """Operations without weights."""
        yield from ()

    def flops(self, work: Computed, linear_time: float = 1.0) -> Iterator[Flops]:
        """Two operations per weight and token, in linear layers times `linear_time`; and others."""
        for part, size, is_linear in self.weights():
            yield Flops(part, 2.0 * size * work.tokens * (linear_time if is_linear else 1.0))
        yield from self.other_flops(work)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        """Bytes that each part keeps for its backward, norms included."""
        share, width = kernels.token_share, self.shape.hidden_size
        norms = (self.shape.has_pre_norms + self.shape.has_post_norms) * kernels.norm(width)
        output = 0.0
        if self.has_own_norm or not kernels.fuses_norms:
            output = kernels.itemsize * width
        else:  # the fused linear layer keeps the norm's output, as its own input
            norms -= kernels.less_of_inputs * width
        return {"layernorm": Saved(output * share), "norms": Saved((norms - output) * share)}

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        """Bytes that each of `offload_modules` moves to the host."""
        return {}

    def working_bytes(self, cfg: Config, device: str, *, backward: bool) -> int:
        """Peak bytes on a rank besides `saved`: of a forward, or of a forward with its backward.
        `device`: `cpu` or `cuda`."""
        return 0

    @property
    def gathered(self) -> tuple[int, int]:
        """(elements that tensor ranks gather for split matrices, and for other uses), per token."""
        return self.shape.hidden_size, 0

    def tensor_elements(self, forwards: float) -> float:
        """Elements that tensor ranks exchange in forwards and a backward.

        They all-gather the inputs of split matrices, and reduce-scatter what these add to hidden
        states. A backward does both for gradients, and gathers the inputs once more for the
        weights' gradients.
        """
        inputs, others = self.gathered
        return (forwards + 1) * (inputs + others + self.shape.hidden_size) + inputs

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """Elements that context ranks exchange in forwards and a backward, over all tensor ranks.

        `others`: tokens received per own token. `is_ring`: keys and values travel around a ring;
        else ranks exchange tokens for heads (all-to-all).
        """
        raise NotImplementedError

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        """Operations of an engine without weights, for generated tokens, tokens of prompts, and
        attending pairs."""
        return 0.0

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """Bytes of a token in the cache of each of `tensor` workers."""
        return 0

    def sequence_bytes(self, itemsize: int, num_drafted: int) -> int:
        """Bytes of a sequence in an engine that do not depend on its length, over all workers."""
        return 0

    def _norm_without_input(self, kernels: Kernels) -> float:
        width = self.shape.hidden_size
        return (kernels.norm(width) - kernels.itemsize * width) * kernels.token_share
