"""Rows with a policy that replays an engine's choices: experts of routers, tokens of indexers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.oracle.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    load_oracle,
    numbers_of,
    own_share,
    pack_all,
    random_sequences,
    tiny_config,
)
from helpers.oracle.rows import Kind, Row
from megatron_grpo.config.config import Config
from megatron_grpo.policy.router import with_own_layers
from parallel import ParallelDims
from parallel.groups import Groups
from parallel.packing import PackedBatch

LAYERS, EXPERTS, TOPK, INDEX_TOPK = 4, 8, 3, 5
REPLAY = "rollout.router_replay=true"
SPARSE = "deepseek_v32"
"""A family with indexers, which choose `INDEX_TOPK` tokens."""
SIZES: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_experts_per_tok": TOPK}
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES | {"num_experts": EXPERTS},
    "glm4_moe": SIZES | {"n_routed_experts": EXPERTS},
    "gpt_oss": SIZES | {"num_local_experts": EXPERTS},
    SPARSE: SIZES
    | {"n_routed_experts": EXPERTS, "index_topk": INDEX_TOPK, "n_group": 1, "topk_group": 1},
}
"""Fields of the tested models, by family."""


def overrides_of(family: str) -> list[str]:
    """Config overrides that replay the choices of a family."""
    others = ["rollout.indexer_replay=true", "rollout.engine=sglang", "rollout.vllm={}"]
    return [REPLAY, *(others if family == SPARSE else ())]


def random_routes() -> list[Tensor]:
    """Random experts for each sequence of `LENGTHS`, uint8 [tokens - 1, layers, topk]; no router
    would choose them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(len(each.tokens) - 1, LAYERS, EXPERTS, generator=generator)
        .topk(TOPK)
        .indices.to(torch.uint8)
        for each in random_sequences(LENGTHS)
    ]


def random_tokens() -> list[Tensor]:
    """Random positions for each sequence of `LENGTHS`, int16 [tokens - 1, layers, index_topk]; 999,
    which nothing reads, for the first tokens, which see all positions."""
    generator, unread = torch.Generator().manual_seed(2), 999
    found = []
    for each in random_sequences(LENGTHS):
        shape = len(each.tokens) - 1, LAYERS, INDEX_TOPK
        tokens = torch.full(shape, unread, dtype=torch.int16)
        for position in range(INDEX_TOPK, len(tokens)):
            scores = torch.rand(LAYERS, position + 1, generator=generator)
            tokens[position] = scores.topk(INDEX_TOPK).indices
        found.append(tokens)
    return found


def batches_with_routes(family: str, dims: ParallelDims) -> list[PackedBatch]:
    """Batches of `LENGTHS` with random experts, and random tokens if the family has indexers."""
    if family != SPARSE:
        return pack_all(LENGTHS, dims, random_routes())
    pairs = zip(random_routes(), random_tokens(), strict=True)
    both = [torch.cat(pair, dim=2) for pair in pairs]
    return pack_all(LENGTHS, dims, both, index_topk=INDEX_TOPK)


def attend(model: AutoModelForCausalLM, tokens: list[Tensor]) -> list[RemovableHandle]:
    """Make every indexer choose `tokens` in one right-padded batch; returns the hooks that do."""
    longest = 1 + max(map(len, tokens))
    padded = torch.zeros(len(tokens), longest, LAYERS, INDEX_TOPK, dtype=torch.int32)
    for row, own in zip(padded, tokens, strict=True):
        row[: len(own)] = own
    padded[:, :INDEX_TOPK] = torch.arange(INDEX_TOPK)
    return [
        block.self_attn.indexer.register_forward_hook(lambda *_, i=layer: padded[:, :, i])
        for layer, block in enumerate(model.model.layers)
    ]


def follow(model: AutoModelForCausalLM, routes: list[Tensor]) -> list[RemovableHandle]:
    """Make every router choose `routes` in one right-padded batch; returns the hooks that do."""
    longest = 1 + max(map(len, routes))
    padded = torch.arange(TOPK).expand(len(routes), longest, LAYERS, TOPK).clone()
    for row, own in zip(padded, routes, strict=True):
        row[: len(own)] = own

    def rerouted(layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        chosen = padded[:, :, layer].flatten(0, 1)

        def hook(module, _inputs, outputs):
            scale = getattr(module, "routed_scaling_factor", None)
            scores = outputs[0].sigmoid() if scale else outputs[0].softmax(-1)
            weights = scores.gather(1, chosen)
            return outputs[0], (scale or 1.0) * weights / weights.sum(-1, keepdim=True), chosen

        return hook

    return [
        getattr(block.mlp, name).register_forward_hook(rerouted(layer))
        for layer, block in enumerate(model.model.layers)
        for name in ("gate", "router")
        if hasattr(block.mlp, name)
    ]


class Routed(Kind):
    """Random choices that no router and no indexer would make."""

    name = "routed"

    def config(self, row: Row, folder: Path, dims: ParallelDims) -> Config:
        return tiny_config(folder, dims, *overrides_of(read_shape(folder).family), *row.overrides)

    def found(self, row: Row, folder: Path, groups: Groups) -> Numbers:
        cfg = self.config(row, folder, groups.dims)
        packed = batches_with_routes(read_shape(folder).family, groups.dims)
        share = [with_own_layers(batch, groups) for batch in own_share(packed, groups)]
        return numbers_of(self.policy(cfg, groups), groups, share)

    def oracle(self, folder: Path) -> OracleCase:
        model = load_oracle(folder)
        follow(model, random_routes())
        if read_shape(folder).indexer:
            attend(model, random_tokens())
        return OracleCase.of(folder, LENGTHS, model)
