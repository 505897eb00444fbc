"""Causal attention over packed sequences (THD) with context parallelism, in plain torch.

Megatron-Core's own torch attention refuses packed sequences and context parallelism; this one
stands in its place where Transformer Engine is not installed. It does so as well for Transformer
Engine's where completions share their prompt, of which that knows nothing. Keys and values of the
other context ranks are all-gathered (Llama 3, arXiv:2407.21783, section 3.3.2), so every rank
computes its own queries exactly and nothing depends on the number of ranks but the order of sums.
"""

from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from parallel.device import attention_dtype
from parallel.flex import flex


class PackedSequences(Protocol):
    """What the attention reads of the params that Megatron-Core hands through its layers."""

    cu_seqlens_q: Tensor
    prefixes: Tensor | None
    """As in `PackedBatch`."""
    block_mask: BlockMask | None
    """The same for flex attention, which then is taken."""
    context_order: tuple[Tensor, Tensor]
    """What the function of that name returns; read where there are several context ranks."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    prefixes: Tensor | None = None,
    rank: int = 0,
    size: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Causal self-attention inside each segment, for the queries of one context-parallel rank.

    `query` [T / size, heads, head_dim] in the order of `context_indices`; `key` and `value`
    [T, key-value heads, head_dim] whole, in packed order; grouped heads are contiguous. The
    segments also attend to all of `prefixes` [n, 2], as in `PackedBatch`. `scale` defaults to
    ``head_dim ** -0.5``. Returns the shape of `query`.
    """
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    lengths = [end - start for start, end in pairwise(bounds)]
    # Split once: slicing inside the loop would make the backward write T zeros per sequence.
    queries = query.split([length // size for length in lengths])
    keys, values = key.split(lengths), value.split(lengths)
    shared = [(0, 0)] * len(lengths) if prefixes is None else prefixes.tolist()
    segments = {start: number for number, start in enumerate(bounds)}
    outputs = []
    for q, k, v, (start, end) in zip(queries, keys, values, shared, strict=True):
        if end > start:
            prefix = segments[start]
            k = torch.cat([keys[prefix][: end - start], k])
            v = torch.cat([values[prefix][: end - start], v])
        if size == 1:
            outputs.append(_attend(q, k, v, scale))
            continue
        chunk = len(q) // 2
        early, late = q.split(chunk)
        early_end, late_end = (
            end - start + chunks * chunk for chunks in (rank + 1, 2 * size - rank)
        )
        outputs.append(_attend(early, k[:early_end], v[:early_end], scale))
        outputs.append(_attend(late, k[:late_end], v[:late_end], scale))
    return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """`query` [L, heads, d] are the last L positions of `key` and `value` [S, kv heads, d]."""
    num_queries, num_keys = len(query), len(key)
    mask = None
    if num_queries < num_keys:  # torch's is_causal would align the first query with the first key
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_keys - num_queries)
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)


class _GatherPacked(torch.autograd.Function):
    """All-gather the context slices of a tensor into packed order; backward sums and scatters.

    Written out because the backward of ``torch.distributed.nn.functional.all_gather`` mistakes
    group ranks for global ranks on gloo subgroups.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, order: Tensor, inverse: Tensor, group: ProcessGroup
    ) -> Tensor:
        ctx.order, ctx.group = order, group
        gathered = local.new_empty(len(order), *local.shape[1:])
        torch.distributed.all_gather_single(gathered, local.contiguous(), group=group)
        return gathered[inverse]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ordered = grad[ctx.order]
        local = ordered.new_empty(len(ordered) // ctx.group.size(), *ordered.shape[1:])
        torch.distributed.reduce_scatter_single(local, ordered, group=ctx.group)
        return local, None, None, None


class PackedAttention(torch.nn.Module):
    """Core attention for Megatron-Core's ``SelfAttention``: packed, causal, context-parallel."""

    def __init__(
        self, *, config: Any, softmax_scale: float | None, pg_collection: Any, **_: Any
    ) -> None:
        """`config` is Megatron's; layer number, mask type and the like are of no use here."""
        super().__init__()
        assert config.attention_dropout == 0.0, "PackedAttention has no dropout"
        self.scale = softmax_scale
        self.group: ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Local slices in (`query` [t, heads, d], `key`, `value` [t, kv heads, d]) and out."""
        assert attention_mask is None, "segments are told apart by cu_seqlens, not by a mask"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        size = self.group.size()
        if size > 1:
            order, inverse = packed_seq_params.context_order
            both = _GatherPacked.apply(torch.stack([key, value], dim=1), order, inverse, self.group)
            key, value = both.unbind(dim=1)
        if packed_seq_params.block_mask is not None:
            return flex(query, key, value, packed_seq_params.block_mask, self.scale)
        dtype = attention_dtype(query.dtype)
        output = packed_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            cu_seqlens,
            prefixes=packed_seq_params.prefixes,
            rank=self.group.rank(),
            size=size,
            scale=self.scale,
        )
        return output.to(query.dtype)
