"""Linear attention of a vLLM for CPUs, by torch, in float32 and on weights as they were loaded.

vLLM's own kernels take bfloat16 alone, and pack the convolution on CPUs that multiply it.
"""

import vllm._custom_ops
from torch import Tensor
from torch.nn.functional import silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from parallel.delta_rule import (
    Chunks,
    causal_convolution,
    gated_delta_rule,
    last_tokens,
    unit_heads,
)


def attend_by_torch() -> None:
    """From now on, linear attention that vLLM builds computes by the function below."""
    gdn_attention.cpu_gdn_attention_core = linear_attention
    if hasattr(vllm._custom_ops, "causal_conv1d_weight_pack"):
        del vllm._custom_ops.causal_conv1d_weight_pack


def linear_attention(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """Compute what this worker's heads read, into `core_attn_out` [T, heads, size of a value].

    `mixed_qkv` [T, channels] are queries, keys and values before the convolution; `b` and `a`
    [T, heads] give strengths and decays. vLLM keeps for each request what the next tokens need:
    the last tokens before the convolution, [size of the kernel - 1, channels], and the memory.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures its memory
        return
    batch = context.attn_metadata[layer.prefix]
    num_requests, num_tokens = batch.num_decodes + batch.num_prefills, batch.num_actual_tokens
    if num_requests == 0:
        return
    slots = batch.non_spec_state_indices_tensor[:num_requests]
    cu_seqlens = batch.non_spec_query_start_loc[: num_requests + 1]
    all_before, memories = layer.kv_cache
    before, memory = all_before[slots].float(), memories[slots].float().mT
    if batch.has_initial_state is not None:
        is_new = ~batch.has_initial_state[:num_requests, None, None]
        before.masked_fill_(is_new, 0)
        memory = memory.masked_fill(is_new.unsqueeze(-1), 0)
    x = mixed_qkv[:num_tokens].float()
    weight = layer.conv1d.weight.squeeze(1).float()
    mixed = silu(causal_convolution(x, weight, cu_seqlens, before))
    query, key, value = (each.squeeze(0) for each in layer.rearrange_mixed_qkv(mixed))
    size = value.shape[1] // key.shape[1]
    query, key = (unit_heads(each).repeat_interleave(size, dim=1) for each in (query, key))
    decay = -layer.A_log.exp() * softplus(a[:num_tokens].float() + layer.dt_bias.float())
    strength = b[:num_tokens].float().sigmoid()
    chunks = Chunks.of(cu_seqlens.diff().tolist(), x.device)
    read, memory = gated_delta_rule(query, key, value, decay, strength, chunks, memory)
    core_attn_out[:num_tokens] = read.to(core_attn_out.dtype)
    all_before[slots] = last_tokens(x, cu_seqlens, before).to(all_before.dtype)
    memories[slots] = memory.mT.to(memories.dtype)
