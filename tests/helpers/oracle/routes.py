"""Rows whose policy follows the choices of an engine: the experts of tokens, and the tokens that
its indexers choose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
"""Whose indexers choose `INDEX_TOPK` tokens."""
SIZES: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_experts_per_tok": TOPK}
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES | {"num_experts": EXPERTS},
    "glm4_moe": SIZES | {"n_routed_experts": EXPERTS},
    "gpt_oss": SIZES | {"num_local_experts": EXPERTS},
    SPARSE: SIZES
    | {"n_routed_experts": EXPERTS, "index_topk": INDEX_TOPK, "n_group": 1, "topk_group": 1},
}
"""Families whose routes are tested, and fields of their models."""


def overrides_of(family: str) -> list[str]:
    """Overrides with which the choices of a family are replayed."""
    others = ["rollout.indexer_replay=true", "rollout.engine=sglang", "rollout.vllm={}"]
    return [REPLAY, *(others if family == SPARSE else ())]


def random_routes() -> list[Tensor]:
    """For each sequence of `LENGTHS`, experts of all its tokens but the last that no router would
    choose."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(len(each.tokens) - 1, LAYERS, EXPERTS, generator=generator)
        .topk(TOPK)
        .indices.to(torch.uint8)
        for each in random_sequences(LENGTHS)
    ]


def random_tokens() -> list[Tensor]:
    """For the same tokens, positions that no indexer would choose; 999 for tokens that see no more
    than are chosen, which nothing reads."""
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
    """The batches of `LENGTHS` with random experts, and with random tokens if a family has them."""
    if family != SPARSE:
        return pack_all(LENGTHS, dims, random_routes())
    pairs = zip(random_routes(), random_tokens(), strict=True)
    both = [torch.cat(pair, dim=2) for pair in pairs]
    return pack_all(LENGTHS, dims, both, index_topk=INDEX_TOPK)


def attend(model: AutoModelForCausalLM, tokens: list[Tensor]) -> None:
    """Make every indexer choose these `tokens` of one right-padded batch."""
    longest = 1 + max(map(len, tokens))
    padded = torch.zeros(len(tokens), longest, LAYERS, INDEX_TOPK, dtype=torch.int32)
    for row, of_sequence in zip(padded, tokens, strict=True):
        row[: len(of_sequence)] = of_sequence
    padded[:, :INDEX_TOPK] = torch.arange(INDEX_TOPK)
    for layer, block in enumerate(model.model.layers):
        block.self_attn.indexer.register_forward_hook(lambda *_, i=layer: padded[:, :, i])


def follow(model: AutoModelForCausalLM, routes: list[Tensor]) -> None:
    """Make every router send the tokens of one right-padded batch where `routes` say."""
    longest = 1 + max(map(len, routes))
    padded = torch.arange(TOPK).expand(len(routes), longest, LAYERS, TOPK).clone()
    for row, of_sequence in zip(padded, routes, strict=True):
        row[: len(of_sequence)] = of_sequence

    def rerouted(layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        chosen = padded[:, :, layer].flatten(0, 1)

        def hook(module, _inputs, outputs):
            scale = getattr(module, "routed_scaling_factor", None)
            scores = outputs[0].sigmoid() if scale else outputs[0].softmax(-1)
            weights = scores.gather(1, chosen)
            return outputs[0], (scale or 1.0) * weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for layer, block in enumerate(model.model.layers):
        for name in ("gate", "router"):
            if hasattr(block.mlp, name):
                getattr(block.mlp, name).register_forward_hook(rerouted(layer))


class Routed(Kind):
    """Made-up choices, which no router and no indexer would make."""

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
