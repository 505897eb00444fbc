"""The PackedSeqParams that Megatron-Core's layers get for a packed microbatch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from parallel.alignment import round_up
from parallel.attention import block_mask
from parallel.delta_rule import Stage, stages
from parallel.groups import Groups
from parallel.images import PackedImages
from parallel.packing import PackedBatch
from parallel.rank_part import context_indices, context_order
from parallel.sparse_attention import Queries

EVEN_LENGTH = 512
"""Longest lengths are rounded up to a multiple of `EVEN_LENGTH` per context rank.

Transformer Engine chooses a backend, and cuDNN builds a graph, for each new longest length; a
length rounded up costs a few empty blocks.
"""


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's PackedSeqParams, plus fields that it passes through to our own modules."""

    pad_between_seqs: bool = False
    """False, as with Megatron's None Transformer Engine compares padded and plain lengths in every
    layer, and waits for the GPU."""
    context_size: int = 1
    num_tokens: int = 0
    """Tokens of the whole microbatch."""
    local: Tensor | None = None
    """[t] packed positions of this context rank's tokens."""
    rope_length: int = 0
    """Rows of the RoPE table in use; every sequence starts at row 0."""
    prefixes: Tensor | None = None
    block_masks: Mapping[int | None, BlockMask] = field(default_factory=dict)
    attention_cu_seqlens: Tensor | None = None
    """Padded lengths for attention, where RoPE has others: see `rotate_own_tokens`."""
    rope_positions: Tensor | None = None
    """For `PackedRotary`: [T] position of each token in its sequence; with images [3, T], for time,
    height and width. None: without images and shared prompts."""
    rope_rows: Tensor | None = None
    """[t] row of each local token in RoPE's table; None: its position in its sequence."""
    routed_experts: Tensor | None = None
    """[tokens and layers of this rank, topk], for `RouterReplay`; None: the routers choose."""
    chosen_tokens: Tensor | None = None
    """[t, layers of this rank, index_topk], for `IndexerReplay`; None: indexers choose."""
    images: PackedImages | None = None
    """For layers that add features: see `add_deepstack`."""

    @property
    def rope_cu_seqlens(self) -> Tensor:
        """Where RoPE starts at position 0: the padded lengths if they are set.

        Megatron's own attention does the same, so `packed_params` can give RoPE other boundaries
        than attention: attention here does not read the padded lengths.
        """
        padded: Tensor | None = self.cu_seqlens_q_padded
        return self.cu_seqlens_q if padded is None else padded

    @cached_property
    def context_order(self) -> tuple[Tensor, Tensor]:
        """`rank_part.context_order` for `PackedAttention`, computed once for all layers."""
        return context_order(self.cu_seqlens_q, self.context_size, self.num_tokens)

    @cached_property
    def queries(self) -> Queries:
        """Queries of sparse attention, computed once for all layers."""
        assert self.local is not None
        return Queries.of(self.local, self.cu_seqlens_q, self.prefixes)

    @cached_property
    def stages(self) -> list[Stage]:
        """`delta_rule.stages` for linear attention, computed once for all layers."""
        return stages(self.cu_seqlens_q, self.prefixes)


def packed_params(
    batch: PackedBatch,
    local: Tensor,
    rank: int,
    size: int,
    windows: Collection[int | None] = (None,),
) -> PackedParams:
    """Params of a microbatch for context rank `rank` of `size`, with the tokens `local` [t].

    `windows`: see `attention_windows`; each gets a block mask.
    """
    # Transformer Engine needs these for context parallelism only.
    padded = batch.cu_seqlens if size > 1 else None
    num_tokens, longest = len(batch.tokens), round_up(batch.max_seqlen, EVEN_LENGTH * size)
    params = PackedParams(
        qkv_format="thd",
        # Alignment padding counts as part of its segment: it comes last, so under causal attention
        # no other token sees it.
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        context_size=size,
        num_tokens=num_tokens,
        local=local,
        rope_length=batch.max_seqlen,
        images=batch.images,
    )
    has_own_rows = batch.prefixes is not None or batch.images is not None
    if batch.tokens.is_cuda and (has_own_rows or any(windows)):
        params.block_masks = {
            window: block_mask(batch.cu_seqlens, batch.prefixes, local, num_tokens, window)
            for window in windows
        }
    if not has_own_rows:
        return params
    # Shared prompts: RoPE and attention need different boundaries. For a prompt of 5 tokens with
    # completions of 3 and 2, packed as 4 + (1 + 3) + (1 + 2) tokens:
    #     cu_seqlens_q          [0, 4, 8, 11]              segments, for attention
    #     rope_positions        0 1 2 3 | 4 5 6 7 | 4 5 6   RoPE would begin each at row 0
    #     cu_seqlens_q_padded   [0, 11]                    one sequence: row t for token t
    # and `PackedRotary` fills row t with the angles of rope_positions[t] (with images, of three
    # positions). Attention is then `PackedAttention`, which does not read the padded lengths: only
    # RoPE does. Megatron gives a context rank the rows of an early and a late part of one zigzag
    # sequence, hence the indices below.
    whole = _first_and_last(batch.cu_seqlens)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = whole
    params.rope_positions = torch.zeros_like(batch.rope_positions)
    params.rope_rows = context_indices(whole, rank, size, num_tokens)
    params.rope_positions[..., params.rope_rows] = batch.rope_positions[..., local]
    params.prefixes = batch.prefixes
    return params


def params_on_rank(
    batch: PackedBatch, groups: Groups, windows: Collection[int | None] = (None,)
) -> PackedParams:
    """`packed_params` of a microbatch on this rank, one of the context ranks that split it."""
    assert batch.part is not None, "set by `run_schedule`"
    local, size = batch.part.local, batch.context_size
    params = packed_params(batch, local, groups.coordinates.context % size, size, windows)
    if groups.is_dynamic:  # one sequence per rank, for RoPE: see `rotate_own_tokens`
        params.cp_group = groups.contexts[size]
        params.attention_cu_seqlens = params.cu_seqlens_q_padded
        params.rope_positions = batch.rope_positions[..., local]
        params.rope_rows = torch.arange(len(local), device=local.device)
        own = _first_and_last(batch.cu_seqlens) // size
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = own
    return params


def _first_and_last(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens[:: len(cu_seqlens) - 1].contiguous()
