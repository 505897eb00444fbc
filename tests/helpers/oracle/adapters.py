"""Policies with adapters, and the same computed plainly in float64 on a model of transformers."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from helpers.oracle.grpo import oracle_logprobs
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    accumulate,
    load_oracle,
    pack_all,
    random_sequences,
)
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import Box
from parallel.groups import Groups

ATTENTION = "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
LATENTS = (
    "lora.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,"
    "shared_experts.up_proj,shared_experts.down_proj,mlp.gate_proj]"
)
TARGETS = {
    "llama": "lora.target_modules=all-linear",
    "gemma3_text": "lora.target_modules=all-linear",
    "phi3": "lora.target_modules=all-linear",
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "deepseek_v3": LATENTS,
    "deepseek_v32": LATENTS,
    "qwen3_5_text": "lora.target_modules=all-linear",
}
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
STEPS = ("optimizer.lr=1e-2", "optimizer.adam_eps=1e-3", "optimizer.lr_warmup_steps=0")


def options(family: str) -> list[str]:
    return ["lora.r=3", "lora.lora_alpha=6", TARGETS[family], "grpo.beta=0.1", *STEPS]


def set_b(policy: Policy) -> None:
    """Give B values, the same in any layout: with B = 0, A has no gradient."""
    assert policy.adapters
    parameters = policy.adapters.parameters()
    for piece in policy.adapters.layout.pieces:
        if ".lora_B." in piece.tensor:
            whole = b_values(piece.tensor, policy.adapters.shapes[piece.tensor])
            values = parameters[piece.local].data[piece.local_box.slices]
            values.copy_(whole[piece.box.slices])


def b_values(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(name.encode()))
    return 0.1 * torch.randn(shape, generator=generator)


Boxes = list[tuple[str, Box, Tensor]]


def boxes_of(policy: Policy, tensors: dict[str, Tensor]) -> Boxes:
    assert policy.adapters
    return [
        (piece.tensor, piece.box, tensors[piece.local].detach()[piece.local_box.slices].clone())
        for piece in policy.adapters.layout.pieces
        if not piece.is_replica
    ]


def gathered_gradients(policy: Policy) -> dict[str, Tensor]:
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return {name: p.main_grad for name, p in policy.adapters.parameters().items()}


def whole(boxes: list[Boxes]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, box, values in (each for of_rank in boxes for each in of_rank):
        if name not in tensors:
            ends = [b.end for of in boxes for n, b, _ in of if n == name]
            tensors[name] = torch.full([*map(max, zip(*ends, strict=True))], torch.nan)
        tensors[name][box.slices] = values
    return tensors


def oracle(
    folder: Path, values: dict[str, Tensor], scale: float, rounded: Mapping[str, Tensor] = NOTHING
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Log-probabilities with and without adapters, gradients, and merged weights, in float64.

    Some merged weights are `rounded` to these, through which gradients go straight.
    """
    model = load_oracle(folder)
    leaves = {name: each.double().requires_grad_() for name, each in values.items()}
    merged = {}
    for name in leaves:
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = leaves[name.replace("lora_A", "lora_B")]
            merged[weight] = model.get_parameter(weight) + scale * b @ leaves[name]
    for name, each in rounded.items():
        exact = merged.get(name, model.get_parameter(name))
        merged[name] = exact + (each.double() - exact).detach()
    sequences = random_sequences(LENGTHS)
    prompts = [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences]
    completions = [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences]

    class WithAdapters:
        dtype = model.dtype

        def __call__(self, **inputs: Any) -> Any:
            return functional_call(model, merged, kwargs=inputs, tie_weights=False)

    logprobs = oracle_logprobs(WithAdapters(), prompts, completions)
    (-LOSS_WEIGHT * torch.cat(logprobs).sum()).backward()
    with torch.no_grad():
        plain = oracle_logprobs(model, prompts, completions)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return [x.detach() for x in logprobs], plain, gradients, merged


def take_step(policy: Policy, groups: Groups) -> None:
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    accumulate(policy, groups, share)
    apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
