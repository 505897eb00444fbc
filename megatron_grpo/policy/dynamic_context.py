"""Lets Megatron-Core's layers split each microbatch over another number of context ranks.

Transformer Engine's attention takes the ranks of a microbatch from its params. RoPE does not: its
ranks are those of the module, also when a layer is recomputed during the backward of another
microbatch. So here RoPE is told that every rank is alone, with one sequence of its own tokens and
the angles of each (cf. `PackedRotary`), and attention is told the boundaries of sequences apart.
"""

from collections.abc import Collection
from copy import copy
from dataclasses import replace
from typing import Any

from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_grpo.policy.packed_params import PackedParams, packed_params
from parallel.attention import PackedAttention
from parallel.groups import Groups
from parallel.packing import PackedBatch


def params_on_rank(
    batch: PackedBatch, groups: Groups, windows: Collection[int | None] = (None,)
) -> PackedParams:
    """The `packed_params` of a microbatch on this rank."""
    assert batch.part is not None, "set by `run_schedule`"
    local, size = batch.part.local, batch.context_size
    group, rank = groups.context_of(size)
    params = packed_params(batch, local, rank, size, windows)
    if groups.is_dynamic:
        _split_dynamically(params, batch, local, group)
    return params


def _split_dynamically(
    params: PackedParams, batch: PackedBatch, local: Tensor, group: ProcessGroup
) -> None:
    """Let the ranks of `group` alone split the microbatch, of which this one holds `local`."""
    params.cp_group = group
    params.attention_cu_seqlens = params.cu_seqlens_q_padded
    params.rope_positions = batch.rope_positions[..., local]
    whole = batch.cu_seqlens[:: len(batch.cu_seqlens) - 1].contiguous()  # first and last
    own = whole // batch.context_size
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = own


def rotate_own_tokens(chunk: Any, groups: Groups) -> None:
    """Let RoPE of a chunk see this rank alone, and attention the boundaries that it needs."""
    for module in chunk.modules():
        if isinstance(module, Attention):
            alone = copy(module.pg_collection)
            alone.cp = groups.contexts[1]
            module.pg_collection = alone
            if not isinstance(module.core_attention, PackedAttention):  # which needs no padded ones
                module.core_attention.register_forward_pre_hook(_tell_boundaries, with_kwargs=True)


def _tell_boundaries(
    _attention: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    params = named["packed_seq_params"]
    padded = params.attention_cu_seqlens
    own = replace(params, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    return positional, named | {"packed_seq_params": own}
