"""Inputs of linear layers, rounded as quantised engines round them: per token, to 8 bits.

Of layers with split columns each worker of an engine has a part of the row, with scales of its own.
Ranks whose columns end inside of such a part agree on its scale.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from checkpoint_convert.formats.torch_dtypes import STORED_DTYPES
from checkpoint_convert.quantized_model import QuantizedModel
from checkpoint_convert.quantizer import block_maxima, dequantized, quantized, token_scales
from megatron_grpo.policy.model import Model, unwrapped
from parallel import Layout
from parallel.groups import Groups


@contextmanager
def rounded_inputs(model: Model, how: QuantizedModel, groups: Groups) -> Iterator[None]:
    """Within the block, linear layers multiply what quantised engines multiply.

    The gradient goes straight through to what is rounded. Collective over tensor ranks.
    """
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    with ExitStack() as stack:
        for name, rounding in _roundings(model.layout, how, groups).items():
            number, _, path = name.partition(".")
            layer: Any = chunks[int(number)].get_submodule(path)
            if getattr(layer, "layer_norm_weight", None) is None:
                stack.enter_context(layer.register_forward_pre_hook(rounding))
            else:
                layer.forward = Normalized(layer, rounding, groups)
                stack.callback(delattr, layer, "forward")
        yield


@dataclass(frozen=True)
class Rounding:
    """How the input [..., this rank's columns] of a linear layer is rounded."""

    dtype: torch.dtype
    """Of the 8-bit numbers."""
    width: int
    """Columns of a token that share a scale."""
    first: int
    """The first of this rank's columns."""
    num_scales: int
    """Of a whole row."""
    group: dist.ProcessGroup | None
    """The ranks with the other columns, if these share scales."""

    def __call__(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook before the layer."""
        return (_StraightThrough.apply(args[0], self), *args[1:])

    def rounded(self, states: Tensor) -> Tensor:
        """What the 8-bit numbers stand for; collective over `group`."""
        tokens, block = states.flatten(0, -2), (1, self.width)
        offset = (0, self.first % self.width)
        maxima = block_maxima(tokens, block, offset).float()
        if self.group is not None and maxima.numel():  # an expert may have no token
            self._agree(maxima)
        scales = token_scales(maxima, self.dtype)
        numbers = quantized(tokens, scales, self.dtype, block, offset)
        return dequantized(numbers, scales, block, offset).to(states.dtype).view_as(states)

    def _agree(self, maxima: Tensor) -> None:
        """Replace this rank's part of the maxima by those over all ranks."""
        row = maxima.new_zeros(len(maxima), self.num_scales)
        own = row.narrow(1, self.first // self.width, maxima.shape[1])
        own.copy_(maxima)
        dist.all_reduce(row, dist.ReduceOp.MAX, self.group)
        maxima.copy_(own)


class _StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(_: Any, states: Tensor, rounding: Rounding) -> Tensor:
        return rounding.rounded(states)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@dataclass(frozen=True)
class Normalized:
    """The forward of a layer of Transformer Engine that begins with a norm, and rounds after it."""

    layer: Any
    rounding: Rounding
    groups: Groups

    def __call__(self, states: Tensor) -> tuple[Tensor, None]:
        """What the layer returns: its product with the bias added, and none apart."""
        layer = self.layer
        scale = layer.layer_norm_weight.float() + layer.zero_centered_gamma
        normalized = rms_norm(states.float(), states.shape[-1:], scale, layer.eps)
        (rounded,) = self.rounding(layer, (normalized.to(states.dtype),))
        group = self.groups.tensor
        if layer.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(rounded, group=group)
        else:
            whole = copy_to_tensor_model_parallel_region(rounded, group=group)
        return linear(whole, layer.weight, layer.bias if layer.use_bias else None), None


def _roundings(layout: Layout, model: QuantizedModel, groups: Groups) -> dict[str, Rounding]:
    """By the local names of linear layers; several experts may be one layer."""
    found: dict[str, Rounding] = {}
    for piece in layout.pieces:
        layer = piece.local.rpartition(".")[0]
        if piece.tensor not in model.inputs or layer in found or ".decoder." not in layer:
            continue
        width, columns = model.inputs[piece.tensor], model.matrices[piece.tensor][1]
        group = groups.expert_tensor if piece.tensor in model.experts else groups.tensor
        found[layer] = Rounding(
            STORED_DTYPES[model.scheme.dtype],
            width,
            piece.box.start[1],
            -(-columns // width),
            group if piece.box.size[1] % width and piece.box.size[1] < columns else None,
        )
    return found
