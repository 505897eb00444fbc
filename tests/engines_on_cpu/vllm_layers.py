"""Layers by torch for vLLM on CPUs, with weights in their loaded form.

vLLM's own kernels for CPUs pack weights, so that pushed ones would not fit, and some are wrong or
slow where tests need them. GPUs have vLLM's kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUExpertsFp8,
    CPUUnquantizedExperts,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, unquantized
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

from engines_on_cpu.products import product
from engines_on_cpu.vllm_linear_attention import attend_by_torch
from engines_on_cpu.vllm_matrices import multiply_by_torch

_forward_cpu = RotaryEmbedding.forward_cpu


def compute_by_torch() -> None:
    """Let layers that vLLM builds compute by the functions below."""
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = experts_of_worker
    multiply_by_torch()
    attend_by_torch()
    RotaryEmbedding.forward_cpu = rotate_heads
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUWorker.sleep = lose_weights
    fp8.backend_to_kernel_cls = int8.backend_to_kernel_cls = kernels_of_experts
    # In an engine with adapters, vLLM asks for those of a GPU.
    unquantized.backend_to_kernel_cls = lambda backend: [CPUUnquantizedExperts]


def experts_of_worker(
    self: CPUUnquantizedExperts | CPUExpertsFp8,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    global_num_experts: int,
    expert_map: Tensor | None,
    **_: Any,
) -> None:
    """Write the sum of this worker's experts to `output` [T, hidden size].

    `w1` [experts, 2 * size, hidden size], `w2` [experts, hidden size, size]; `topk_weights` and
    `topk_ids` [T, experts per token]. Experts of other workers are -1 in `expert_map`, and vLLM's
    kernels for packed weights would read arbitrary memory for them.
    """
    gated = _GATES[activation]
    ids = topk_ids if expert_map is None else expert_map[topk_ids]
    output.zero_()

    def through(
        x: Tensor, weights: Tensor, scales: Tensor | None, biases: Tensor | None, expert: int
    ) -> Tensor:
        own_scales = None if scales is None else scales[expert]
        outputs = product(x, weights[expert], own_scales, self.block_shape)
        return outputs if biases is None else outputs + biases[expert]

    for expert in ids[ids >= 0].unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        both = through(hidden_states[token], w1, self.w1_scale, self.w1_bias, expert)
        values = through(gated(both), w2, self.w2_scale, self.w2_bias, expert)
        weights = topk_weights[token, slot].unsqueeze(-1)
        output.index_add_(0, token, (values * weights).to(output.dtype))


def _silu(both: Tensor) -> Tensor:
    """Gate and up are halves."""
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _swigluoai(both: Tensor) -> Tensor:
    """Gate and up alternate."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_GATES = {MoEActivation.SILU: _silu, MoEActivation.SWIGLUOAI: _swigluoai}


def all_gatherv(
    self: CpuCommunicator, input_: Tensor | list[Tensor], dim: int, sizes: Sequence[int]
) -> Tensor | list[Tensor]:
    """Tokens of all workers in a group, `sizes` tokens by worker.

    vLLM has this for GPUs only. Groups of workers that share experts exchange their tokens by it.
    """
    if isinstance(input_, list):
        return [torch.as_tensor(all_gatherv(self, each, dim, sizes)) for each in input_]
    whole = input_.new_empty(sum(sizes), *input_.shape[1:])
    for rank, part in enumerate(whole.split(list(sizes), dim)):
        if rank == self.rank_in_group:
            part.copy_(input_)
        if part.numel():
            dist.broadcast(part, src=self.ranks[rank], group=self.device_group)
    return whole


def reduce_scatterv(
    self: CpuCommunicator, input_: Tensor, dim: int, sizes: Sequence[int]
) -> Tensor:
    """This worker's tokens, summed over all workers of a group."""
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes), dim)[self.rank_in_group]


def lose_weights(self: CPUWorker, level: int = 1) -> None:
    """Overwrite all parameters by NaN (integers: -1) at level 2, where a GPU gives their memory
    away; vLLM restores buffers there."""
    for model in (self.get_model(), self.get_draft_model()):
        for parameter in model.parameters() if model is not None and level == 2 else ():
            parameter.untyped_storage().fill_(0xFF)


class QuantizedExperts(CPUExpertsFp8):
    """Experts with 8-bit weights and scales in their loaded form."""

    apply = experts_of_worker

    @staticmethod
    def is_supported_config(*_: Any) -> tuple[bool, str | None]:
        """True: any CPU, and every scheme and router of this project."""
        return True, None


def kernels_of_experts(backend: fp8.Fp8MoeBackend | int8.Int8MoeBackend) -> list[type]:
    """Let experts of quantised models be `QuantizedExperts`.

    vLLM takes them for one of its GPU kernels that leave weights in their loaded form.
    """
    return [QuantizedExperts] if backend.name == "TRITON" else []


def rotate_heads(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Let torch rotate queries and keys that have a dimension for heads, as in latent attention.

    vLLM 0.32's kernel for CPUs rotates wrong elements: it takes the stride between heads for the
    stride between tokens. Its kernel for GPUs knows the dimension.
    """
    if query.dim() == 2:
        return _forward_cpu(self, positions, query, key)
    return self.forward_native(positions, query, key)
