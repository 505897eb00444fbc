"""Causal attention over packed sequences (THD) with context parallelism, in plain torch.

Megatron-Core's own torch attention refuses packed sequences and context parallelism: this module
replaces it where Transformer Engine is not installed. It also replaces Transformer Engine's
attention for shared prompts, and for windows under context parallelism, which it does not support.
On a GPU it then runs torch's flex attention, one kernel for all segments: a query sees ranges of
packed positions, its own segment up to itself and the segments that this one continues, mostly a
prompt. Keys are not copied, and blocks of keys that no query of a block sees are skipped.

In a layer with a window, a token sees the last `window` tokens of its sequence, itself included.
Sinks (gpt-oss, arXiv:2508.10925) add one score per head, with a value of zero, to the softmax:
output = output without sink * sigmoid(lse - sink), with lse = log sum exp of the other scores.

Keys and values of the other context ranks are all-gathered (Llama 3, arXiv:2407.21783, section
3.3.2): every rank computes its own queries exactly, and only the order of sums depends on the
number of ranks.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from parallel.dtypes import attention_dtype

BLOCK = 128
"""Number of queries, and of keys, in a block: flex attention's default."""
SLAB = 64 * BLOCK
"""Queries compared with all blocks of keys at a time: tensors of 8 MB at 128k tokens."""


def block_mask(
    cu_seqlens: Tensor,
    prefixes: Tensor | None,
    queries: Tensor,
    num_tokens: int | None = None,
    window: int | None = None,
) -> BlockMask:
    """Mask of `queries`, packed positions [t], against all keys in packed order.

    `cu_seqlens` [n + 1], `prefixes` [n, most parts, 2] and `num_tokens` as in `PackedBatch`; with
    None, the host reads the number of tokens from `cu_seqlens`, and waits for a GPU.
    """
    if prefixes is None:
        prefixes = cu_seqlens.new_zeros(len(cu_seqlens) - 1, 1, 2, dtype=torch.long)
    segment = torch.bucketize(queries, cu_seqlens[1:], right=True)
    first = cu_seqlens[:-1].long()[segment]
    # Indexed one by one into separate tensors: the compiler does not support views of one.
    parts = [(part[:, 0][segment], part[:, 1][segment]) for part in prefixes.unbind(1)]
    if window is not None:
        lengths = [end - start for start, end in parts]
        # The window hides the oldest tokens, in the first part first. Negative: it hides none.
        unseen = queries - first + sum(lengths) - window + 1  # tokens before the window
        first = torch.maximum(first, queries - window + 1)
        for number, (start, end) in enumerate(parts):
            parts[number] = start + unseen.clamp(min=0), end
            unseen = unseen - lengths[number]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = (key >= first[query]) & (key <= queries[query])
        for start, end in parts:
            is_seen = is_seen | ((key >= start[query]) & (key < end[query]))
        return is_seen

    total = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    starts = torch.arange(0, total, BLOCK, device=queries.device)
    slabs = [
        _blocks_seen([*zip(bounds[::2], bounds[1::2], strict=True)], starts)
        for bounds in zip(
            *(bound.split(SLAB) for part in [(first, queries + 1), *parts] for bound in part),
            strict=True,
        )
    ]
    some, whole = (torch.cat(slab) for slab in zip(*slabs, strict=True))
    # Not `create_block_mask`, which would evaluate `sees` for all pairs of tokens.
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), total),
    )


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of `query` [t, heads, d] to `key` and `value` [T, kv heads, d] under `mask`.

    `sinks` is [heads].
    """
    attend = _compiled() if query.is_cuda else flex_attention
    found: Any = attend(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_kernel_options(query) if query.is_cuda else None,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        output: Tensor = found
    else:
        output, aux = found
        # flex attention has no sinks: scale its output, see the equation of the module.
        output = output * torch.sigmoid(aux.lse - sinks[:, None]).to(output.dtype).unsqueeze(-1)
    return output.squeeze(0).transpose(0, 1)


def _kernel_options(query: Tensor) -> dict[str, Any]:
    # Below 128 queries torch 2.13 chooses a decoding kernel, and with several key heads it finds no
    # tiles that fit our blocks (pytorch/pytorch#185349).
    options: dict[str, Any] = {"BACKEND": "TRITON"}
    if query.dtype == torch.float32 and query.shape[-1] > 128:
        # torch tunes tiles for heads of 64, 128 and 256. Its tiles for other sizes take 279 kB of
        # shared memory in three stages at DeepSeek's 192; an H200 has 232 kB. Use the tiles of 256.
        options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}
    return options


@cache
def _compiled() -> Any:
    """Flex attention compiled for dynamic shapes: few kernels for all lengths of microbatches."""
    compiler: Any = torch.compile  # torch 2.13's overloads lack recompile_limit
    # Passes with and without gradients, and with a single block, compile apart: up to 12 kernels.
    # Beyond its limit, 8 by default, torch would compute all pairs of tokens; `fullgraph` makes
    # that an error.
    return compiler(flex_attention, dynamic=True, fullgraph=True, recompile_limit=64)


def _blocks_seen(ranges: Sequence[tuple[Tensor, Tensor]], starts: Tensor) -> tuple[Tensor, Tensor]:
    """Key blocks that each query block sees at all, and sees entirely: bool [t / BLOCK, blocks].

    Key blocks begin at `starts`; `ranges` are pairs (first, end) [t]: query i sees the keys
    [first[i], end[i]) of each.
    """
    some = whole = starts.new_zeros((), dtype=torch.bool)
    for first, end in ranges:
        first, end = first[:, None], end[:, None]
        # `first < end`: an empty range, such as that of padding prefixes, may lie within a block.
        some = some | ((first < starts + BLOCK) & (end > starts) & (first < end))
        # A block that two ranges cover only together stays partial: the mask decides, as exactly.
        whole = whole | ((first <= starts) & (end >= starts + BLOCK))
    return _by_block(some).any(dim=1), _by_block(whole).all(dim=1)


def _by_block(rows: Tensor) -> Tensor:
    """View [t, key blocks] as [query blocks, BLOCK, key blocks]; False beyond the end."""
    missing = -len(rows) % BLOCK
    return pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of set key blocks of each query block, and all key blocks, the set ones first.

    Int32 [1, 1, query blocks] and [1, 1, query blocks, key blocks], for any batch entry and head.
    """
    numbers = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(dim=1).int()[None, None], numbers[None, None]


class PackedSequences(Protocol):
    """The fields that attention reads from the params that Megatron-Core passes to its layers."""

    cu_seqlens_q: Tensor
    prefixes: Tensor | None
    """As in `PackedBatch`."""
    block_masks: Mapping[int | None, BlockMask]
    """Mask for flex attention by window (None: layers without); empty: no flex attention."""
    context_order: tuple[Tensor, Tensor]
    """Result of the function `context_order`; read only with several context ranks."""
    cp_group: ProcessGroup | None
    """The ranks that split these sequences; None: all context ranks."""


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
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal self-attention within each segment, for the queries of one context-parallel rank.

    `query` [T / size, heads, head_dim] is in the order of `context_indices`; `key` and `value`
    [T, key-value heads, head_dim or value_dim] are complete and in packed order; grouped heads are
    contiguous. A segment attends to its `prefixes` [n, most parts, 2], as in `PackedBatch`, and to
    itself, or to the last `window` tokens of both. `scale` defaults to ``head_dim ** -0.5``;
    `sinks` is [heads]. Returns [T / size, heads, value_dim].
    """
    bounds = [int(bound) for bound in cu_seqlens.tolist()]
    lengths = [end - start for start, end in pairwise(bounds)]
    # Split once: slicing in the loop would make the backward write T zeros per sequence.
    queries = query.split([length // size for length in lengths])
    keys, values = key.split(lengths), value.split(lengths)
    shared = [[]] * len(lengths) if prefixes is None else prefixes.tolist()
    segments = {start: number for number, start in enumerate(bounds)}
    outputs = []
    for q, k, v, parts in zip(queries, keys, values, shared, strict=True):
        before = [(segments[start], end - start) for start, end in parts if end > start]
        num_before = sum(length for _, length in before)
        if before:
            k = torch.cat([*(keys[number][:length] for number, length in before), k])
            v = torch.cat([*(values[number][:length] for number, length in before), v])
        if size == 1:
            outputs.append(_attend(q, k, v, scale, window, sinks))
            continue
        # Zigzag: the rank's queries are chunks `rank` and 2 * size - 1 - rank of the segment.
        chunk = len(q) // 2
        early, late = q.split(chunk)
        early_end = num_before + (rank + 1) * chunk
        late_end = num_before + (2 * size - rank) * chunk
        outputs.append(_attend(early, k[:early_end], v[:early_end], scale, window, sinks))
        outputs.append(_attend(late, k[:late_end], v[:late_end], scale, window, sinks))
    return torch.cat(outputs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of `query` [L, heads, d] at the last L of the S positions of `key` and `value`."""
    if window is None or window >= len(key):
        return _sdpa(query, key, value, scale, window, sinks)
    # Query block by query block: no window of a block reaches most keys of a long sequence.
    outputs, position = [], len(key) - len(query)
    for block in query.split(max(window, BLOCK)):
        seen = slice(max(0, position - window + 1), position + len(block))
        outputs.append(_sdpa(block, key[seen], value[seen], scale, window, sinks))
        position += len(block)
    return torch.cat(outputs)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by torch's kernel, which compares all queries with all keys."""
    num_queries, num_keys, value_dim = len(query), len(key), value.shape[-1]
    if sinks is not None:
        # Divided by `scale`, because torch multiplies every score by it. The default is stated: a
        # query with its sink has one element more.
        scale = scale or query.shape[-1] ** -0.5
        query, key, value = _with_sinks(query, key, value, sinks / scale)
    if value_dim < query.shape[-1]:  # torch's fast CPU kernel needs equal sizes of all heads
        value = pad(value, (0, query.shape[-1] - value_dim))
    mask, offset = None, num_keys - num_queries
    seen = num_keys if window is None else min(window, num_keys)
    # torch's is_causal aligns the first query with the first key, and would hide the sink.
    if offset or seen < num_keys or sinks is not None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(offset).triu(offset - seen + 1)
        if sinks is not None:
            mask = pad(mask, (0, 1), value=True)
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)[..., :value_dim]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key of value zero; its product with a query is the sink of the query's head.

    Queries get the sink as one more element, where the new key has 1 and the others 0: torch's
    kernel counts it like any score, and computes its gradient.
    """
    query = torch.cat([query, sinks[:, None].expand(len(query), -1, 1)], dim=-1)
    key = pad(key, (0, 1, 0, 0, 0, 1))
    key[-1, :, -1] = 1
    return query, key, pad(value, (0, 0, 0, 0, 0, 1))


class _GatherPacked(torch.autograd.Function):
    """All-gather the context slices of a tensor into packed order; the backward reduce-scatters.

    Implemented here because the backward of ``torch.distributed.nn.functional.all_gather`` confuses
    group ranks with global ranks on gloo subgroups.
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


def gather_packed(local: Tensor, params: PackedSequences, group: ProcessGroup) -> Tensor:
    """Gather the context slices [T / size, ...] of a tensor into packed order [T, ...]."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherPacked.apply(local, *params.context_order, group)
    return gathered


class PackedAttention(torch.nn.Module):
    """Core attention for Megatron-Core's ``SelfAttention``: packed, causal, context-parallel."""

    def __init__(
        self,
        *,
        config: Any,
        layer_number: int,
        softmax_scale: float | None,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        """`config` is Megatron's; `layer_number` begins at 1, and further arguments are ignored."""
        super().__init__()
        assert config.attention_dropout == 0.0, "PackedAttention has no dropout"
        self.scale = softmax_scale
        self.window: int | None = None
        if config.window_size is not None and config.window_attn_skip_freq[layer_number - 1]:
            self.window = config.window_size[0] + 1  # Megatron's excludes the token itself
        self.softmax_offset: Tensor | None = None  # sinks of this rank's heads
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
        """Attend, on this rank's slices: `query` [t, heads, d], others [t, kv heads, d]."""
        assert attention_mask is None, "cu_seqlens separates segments, not a mask"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        group = packed_seq_params.cp_group or self.group
        size = group.size()
        if size > 1:
            # One collective instead of two.
            both = gather_packed(torch.cat([key, value], dim=-1), packed_seq_params, group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        if packed_seq_params.block_masks:
            mask = packed_seq_params.block_masks[self.window]
            return flex(query, key, value, mask, self.scale, self.softmax_offset)
        dtype = attention_dtype(query.dtype)
        output = packed_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            cu_seqlens,
            prefixes=packed_seq_params.prefixes,
            rank=group.rank(),
            size=size,
            scale=self.scale,
            window=self.window,
            sinks=None if self.softmax_offset is None else self.softmax_offset.to(dtype),
        )
        return output.to(query.dtype)
