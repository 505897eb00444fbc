"""Policies with adapters, against W + s B A in float64 on a model of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from checkpoint_convert import read_shape
from helpers.oracle.grpo import oracle_logprobs
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    OracleCase,
    assert_equal_tensors,
    boxes_of,
    check_logprobs,
    load_oracle,
    logprobs_of,
    numbers_of,
    random_sequences,
    tiny_config,
    whole,
)
from helpers.oracle.rows import Kind, Row, Worlds
from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.reference import reference_of
from parallel import ParallelDims
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
    targets = TARGETS.get(family, ATTENTION)
    return ["lora.r=3", "lora.lora_alpha=6", targets, "grpo.beta=0.1", *STEPS]


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


Answer = tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Log-probabilities with and without adapters, gradients, and merged weights."""
SCALE = 2.0
"""s = alpha / r of `options`."""


def oracle(
    folder: Path, values: dict[str, Tensor], scale: float, rounded: Mapping[str, Tensor] = NOTHING
) -> Answer:
    """Results of adapters with these `values`, in float64 on a model of transformers.

    Merged weights in `rounded` are replaced by it, with straight-through gradients.
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
    merged = {name: weight.detach() for name, weight in merged.items()}
    return [x.detach() for x in logprobs], plain, gradients, merged


class Adapted(Kind):
    """Training adapters: log-probabilities, gradients, the reference policy and the served weights.

    Bits of the served weights do not depend on the layout.
    """

    name = "lora"

    def config(self, row: Row, folder: Path, dims: ParallelDims) -> Config:
        given = options(read_shape(folder).family)
        return tiny_config(folder, dims, *given, *self.overrides, *row.overrides)

    def found(self, row: Row, folder: Path, groups: Groups) -> dict[str, Any]:
        cfg = self.config(row, folder, groups.dims)
        policy, share = self.policy(cfg, groups), self.pack(cfg, groups)
        set_b(policy)
        found: dict[str, Any] = {
            "reference": logprobs_of(reference_of(policy, cfg, groups), groups, share)
        }
        found["numbers"] = numbers_of(policy, groups, share)
        found["values"] = boxes_of(policy.adapters, policy.adapters.parameters())
        served = policy.served(LoraConfig(sync="merged"))
        found["served"] = boxes_of(policy, {n: served[n] for n in policy.parameters()})
        frozen = [*policy.parameters().values()]
        assert not any(p.requires_grad or hasattr(p, "main_grad") for p in frozen)
        return found | {"base": policy.adapters.base}

    def check(self, row: Row, worlds: Worlds, ranks: Sequence[Any]) -> None:
        values, served = (whole([rank[key] for rank in ranks]) for key in ("values", "served"))
        logprobs, plain, gradients, merged = self.answer(row, worlds, values, served)
        assert max((a - b).abs().max() for a, b in zip(logprobs, plain, strict=True)) > 1e-2
        check_logprobs([rank["reference"] for rank in ranks], plain)
        OracleCase(Path(), logprobs, gradients).check([rank["numbers"] for rank in ranks])
        for name, weight in merged.items():
            torch.testing.assert_close(served[name].double(), weight, atol=1e-6, rtol=1e-6)
        one = worlds.ranks(replace(row, layout="", overrides=()))[0]
        assert_equal_tensors(served, whole([one["served"]]))
        assert {rank["base"] for rank in ranks} == {one["base"]}

    def answer(
        self, row: Row, worlds: Worlds, values: dict[str, Tensor], served: dict[str, Tensor]
    ) -> Answer:
        """The oracle's results for adapters with these values."""
        return oracle(worlds.folder(row.model), values, SCALE)
