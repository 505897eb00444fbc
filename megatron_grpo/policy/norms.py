"""RMS norms that Megatron-Core lacks, as modules of its layers."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm

from checkpoint_convert import ModelShape


def use_norms(layer: ModuleSpec, shape: ModelShape, config: TransformerConfig, norm: Any) -> None:
    """Put norms where a model deviates from norms before attention and MLP, and over each head."""
    modules, attention = layer.submodules, layer.submodules.self_attention.submodules
    if shape.has_post_norms:
        added = ModuleSpec(module=PostNorm, params={"config": config, "norm": norm})
        modules.self_attn_bda = modules.mlp_bda = added
    if not shape.has_pre_norms:
        modules.input_layernorm = modules.pre_mlp_layernorm = IdentityOp
    if shape.norms_all_heads:
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm


def normalized(x: Tensor, weight: Tensor, eps: float | None, is_zero_centered: bool) -> Tensor:
    """RMS norm of x [..., H], times the weight [H], or times 1 + weight if zero-centred."""
    if not is_zero_centered:
        return rms_norm(x, weight.shape, weight, eps)
    # In bfloat16, 1 + weight would drop digits of a small weight.
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """Torch's RMS norm: Megatron-Core's wrapper refuses sequence parallelism (test_upstream:
    torch_norm)."""

    returns_residual = False  # read by Megatron-Core

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        # Each tensor rank sees a part of the tokens; the mark makes Megatron sum the gradient.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.weight, self.eps, self.is_zero_centered)


class PostNorm(torch.nn.Module):
    """Adds the normed output of attention or MLP to the residual stream.

    Stands in for Megatron-Core's bias-dropout-add: the hook of an adapter on the last linear layer
    has then run before the norm.
    """

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.norm = build_module(norm, config=config, hidden_size=size, eps=eps)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function for the addition, as Megatron-Core's `get_bias_dropout_add` does."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float
    ) -> Tensor:
        return residual + self.norm(output_with_bias[0])


class HeadsNorm(RMSNorm):
    """A norm over all heads of queries or of keys, [t, b, heads of this rank, head_dim].

    A tensor rank has the weight of all heads, and its own heads' mean square. Ranks have equally
    many heads, or equally many copies of each: the mean over ranks is the mean over all heads.
    """

    heads: ClassVar[str]
    """Field of Megatron's config with the number of heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, getattr(config, self.heads) * hidden_size, eps)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise in float32 at least, like torch's norm."""
        group = get_tensor_model_parallel_group()
        values = heads.to(torch.promote_types(heads.dtype, torch.float32))
        mean = values.square().mean(dim=(-2, -1), keepdim=True) / group.size()
        # `reduce` passes the gradient through; each rank's heads use the sum, so `copy` must sum
        # their gradients over the ranks.
        mean = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(mean))
        weights = self.weight.unflatten(0, (-1, heads.shape[-1]))
        first = group.rank() * len(weights) // group.size()
        weights = weights[first : first + heads.shape[-2]]
        assert self.eps is not None
        return (values * torch.rsqrt(mean + self.eps) * weights).to(heads.dtype)


class QueryNorm(HeadsNorm):
    """Norm of queries."""

    heads = "num_attention_heads"


class KeyNorm(HeadsNorm):
    """Norm of keys."""

    heads = "num_query_groups"
