"""Linear attention by torch for vLLM on CPUs, in float32 with weights in their loaded form.

vLLM's own kernels take only bfloat16, and pack the convolution on CPUs that multiply bfloat16.
"""

from typing import Any

import torch
import vllm._custom_ops
from torch import Tensor
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from parallel.delta_rule import (
    Chunks,
    causal_convolution,
    gated_delta_rule,
    last_tokens,
    unit_heads,
)


def attend_by_torch() -> None:
    """Let linear attention that vLLM builds compute by `linear_attention`."""
    gdn_attention.cpu_gdn_attention_core = linear_attention
    if hasattr(vllm._custom_ops, "causal_conv1d_weight_pack"):
        del vllm._custom_ops.causal_conv1d_weight_pack


def linear_attention(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """Write the outputs of this worker's heads to `core_attn_out` [T, heads, size of a value].

    `mixed_qkv` [T, channels] are queries, keys and values before the convolution; `b` and `a`
    [T, heads] give strengths and decays. For the next tokens vLLM keeps each request's memory and
    last inputs of the convolution, [size of the kernel - 1, channels].
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures its memory
        return
    batch = context.attn_metadata[layer.prefix]

    def read(
        tokens: Tensor | slice, cu_seqlens: Tensor, before: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute these tokens; returns the convolution's last inputs, and the memory."""
        x = mixed_qkv[tokens].float()
        weight = layer.conv1d.weight.squeeze(1).float()
        mixed = silu(causal_convolution(x, weight, cu_seqlens, before))
        query, key, value = (each.squeeze(0) for each in layer.rearrange_mixed_qkv(mixed))
        size = value.shape[1] // key.shape[1]
        query, key = (unit_heads(each).repeat_interleave(size, dim=1) for each in (query, key))
        decay = -layer.A_log.exp() * softplus(a[tokens].float() + layer.dt_bias.float())
        strength = b[tokens].float().sigmoid()
        chunks = Chunks.of(cu_seqlens.diff().tolist(), x.device)
        outputs, memory = gated_delta_rule(query, key, value, decay, strength, chunks, memory)
        core_attn_out[tokens] = outputs.to(core_attn_out.dtype)
        return last_tokens(x, cu_seqlens, before), memory

    if batch.num_decodes + batch.num_prefills:
        _read_runs(layer, batch, read)
    if batch.num_spec_decodes:
        _read_drafts(layer, batch, read)


def _read_runs(layer: Any, batch: GDNAttentionMetadata, read: Any) -> None:
    """Outputs of requests without drafts."""
    num_requests = batch.num_decodes + batch.num_prefills
    tokens = batch.non_spec_token_indx if batch.num_spec_decodes else slice(batch.num_actual_tokens)
    slots = batch.non_spec_state_indices_tensor[:num_requests]
    all_before, memories = layer.kv_cache
    num_before = layer.conv1d.weight.shape[-1] - 1
    before, memory = all_before[slots, :num_before].float(), memories[slots].float().mT
    if batch.has_initial_state is not None:
        is_new = ~batch.has_initial_state[:num_requests, None, None]
        before.masked_fill_(is_new, 0)
        memory = memory.masked_fill(is_new.unsqueeze(-1), 0)
    cu_seqlens = batch.non_spec_query_start_loc[: num_requests + 1]
    before, memory = read(tokens, cu_seqlens, before, memory)
    all_before[slots, :num_before] = before.to(all_before.dtype)
    memories[slots] = memory.mT.to(memories.dtype)


def _read_drafts(layer: Any, batch: GDNAttentionMetadata, read: Any) -> None:
    """Outputs of requests with drafts, one token of each request at a time.

    The next pass tells how many drafts were accepted: so vLLM has a memory for each draft, and room
    for the convolution's inputs of all of them.
    """
    num_requests = batch.num_spec_decodes
    slots = batch.spec_state_indices_tensor[:num_requests].long()
    starts = batch.spec_query_start_loc[: num_requests + 1]
    taken = batch.num_accepted_tokens[:num_requests].long() - 1
    all_before, memories = layer.kv_cache
    num_before = layer.conv1d.weight.shape[-1] - 1
    window = torch.arange(num_before)
    before = all_before[slots[:, :1], taken[:, None] + window].float()
    memory = memories[slots.gather(1, taken[:, None])[:, 0]].float().mT
    lengths = starts.diff()
    for number in range(int(lengths.max())):
        rows = (lengths > number).nonzero()[:, 0]
        tokens = batch.spec_token_indx[starts[rows] + number]
        cu_seqlens = torch.arange(len(rows) + 1)
        before[rows], memory[rows] = read(tokens, cu_seqlens, before[rows], memory[rows])
        all_before[slots[rows, :1], number + window] = before[rows].to(all_before.dtype)
        memories[slots[rows, number]] = memory[rows].mT.to(memories.dtype)
