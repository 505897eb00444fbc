"""Attention by torch for SGLang on CPUs, with sinks and latents, which SGLang's own lacks."""

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, factory, get_rope
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def attend_by_torch() -> None:
    """Let attention that SGLang builds take sinks, and attend to latents without kernels, even in
    prefills.

    In prefills SGLang would use keys and values, which torch's backend looks for in the cache. It
    also has RoPE only with YaRN, and requantises 8-bit weights of latents with a single scale.
    """
    ATTENTION_BACKENDS["torch_native"] = TorchAttention
    AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: AttnForwardMethod.MLA
    )
    factory.get_rope_cpu = rotary_embedding
    deepseek_weight_loader._is_cuda = True  # there it dequantises these weights


def rotary_embedding(*arguments: Any) -> RotaryEmbedding:
    """RoPE of all other models; the last argument is the device."""
    return get_rope(*arguments[:-1])


class TorchAttention(TorchNativeAttnBackend):
    """SGLang's torch backend with `attention` in place of torch's function."""

    def forward(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See SGLang."""
        torch_native_backend.scaled_dot_product_attention = partial(attention, sinks=sinks)
        return super().forward(*args, **kwargs)

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the sequences that pad a batch to the size of another group's."""
        return 1


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    **options: Any,
) -> Tensor:
    """Attention of queries [1, heads, Q, size] with one more key for the sink of each head.

    The sink's score is `sinks` [heads], its value zero. `attn_mask` [Q, K] is true for seen keys.
    """
    if sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
        )
    size = query.shape[-2], key.shape[-2]
    seen = torch.ones(size, dtype=torch.bool) if attn_mask is None else attn_mask
    hidden = ~(seen.tril() if is_causal else seen)
    bias = query.new_zeros(len(sinks), *size).masked_fill(hidden, -torch.inf)
    column = sinks.to(query.dtype)[:, None, None].expand(-1, size[0], 1)
    key, value = (pad(each, (0, 0, 0, 1)) for each in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=torch.cat((bias, column), -1), **options
    )
