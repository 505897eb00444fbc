"""The dense MLP, and the mixture of experts in its place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb
from typing import ClassVar

from checkpoint_convert.shape import MoeShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.block import Block, Kernels, Saved, Weights
from megatron_grpo.planning.card import GpuSpec


@dataclass(frozen=True)
class Mlp(Block):
    """A dense MLP, with or without gates."""

    repeats: ClassVar[Mapping[str, str]] = {"tensor": "mlp"}

    def weights_of_width(self, width: int) -> int:
        """Weights of an MLP of this intermediate size."""
        return (3 if self.shape.has_gates else 2) * self.shape.hidden_size * width

    def weights(self) -> Iterator[Weights]:
        yield Weights("mlp", self.weights_of_width(self.shape.intermediate_size))

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        columns = self.shape.intermediate_size / kernels.dims.tensor
        inner = kernels.activation(self.shape.has_gates) * columns
        return super().saved(kernels) | {"mlp": Saved(inner)}

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        if kernels.fuses_norms and not self.has_own_norm:
            return {}
        return {"mlp_norm": self._norm_without_input(kernels)}


@dataclass(frozen=True)
class Experts(Mlp):
    """A router, experts that get equally many tokens, and a shared expert for all tokens."""

    has_own_norm = True
    attainable = 0.3
    """Matrices are small. verl reports 0.31: Qwen3-30B-A3B on 32 GPUs."""
    repeats: ClassVar[Mapping[str, str]] = {"tensor": "shared_experts", "expert": "moe"}

    @property
    def moe(self) -> MoeShape:
        assert self.shape.moe is not None
        return self.shape.moe

    def weights(self) -> Iterator[Weights]:
        moe, hidden = self.moe, self.shape.hidden_size
        yield Weights("moe", moe.experts_per_token * self.weights_of_width(moe.intermediate_size))
        yield Weights("moe", hidden * moe.num_experts, is_linear=False)
        yield Weights("shared_experts", self.weights_of_width(moe.shared_intermediate_size))
        yield Weights("shared_experts", hidden * moe.has_shared_gate, is_linear=False)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        """Router, permuted tokens and chosen experts."""
        moe, shape, itemsize = self.moe, self.shape, kernels.itemsize
        inner, precision = kernels.activation(shape.has_gates), kernels.precision
        # 8: Megatron-Core sorts all pairs of a token and an expert, and keeps their order whole.
        router = 8 * moe.num_experts + 20 * moe.experts_per_token
        if moe.score_function == "sigmoid":  # all scores, and the sum of those that are chosen
            router += 4 * moe.num_experts + 4
        # Ranks that split an expert's matrices all hold the tokens of the whole group, each with
        # its float32 probability, and a part of the columns.
        tokens = precision.expert_itemsize * shape.hidden_size + 4
        weighed = 0 if kernels.fuses_activation else itemsize
        chosen = tokens * kernels.dims.expert_tensor + (inner + weighed) * moe.intermediate_size
        shared = inner * moe.shared_intermediate_size / kernels.dims.tensor
        if moe.has_shared_gate:  # both factors of the gate's product
            shared += itemsize * (shape.hidden_size + 1) * kernels.token_share
        return Block.saved(self, kernels) | {
            "moe": Saved((router + moe.experts_per_token * chosen) * kernels.token_share),
            "shared_experts": Saved(shared),
        }

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        chosen = self.moe.experts_per_token * kernels.token_share
        tokens = kernels.precision.expert_itemsize * self.shape.hidden_size
        return {
            **super().offloadable(kernels),
            "expert_fc1": chosen * tokens * kernels.dims.expert_tensor,
            "moe_act": chosen * 2 * kernels.itemsize * self.moe.intermediate_size,
        }

    def tensor_elements(self, forwards: float) -> float:
        """Exchanges for the expert that all tokens go to."""
        return super().tensor_elements(forwards) if self.moe.shared_intermediate_size else 0.0


def copies_to_experts(cfg: Config, moe: MoeShape, card: GpuSpec) -> tuple[int, float]:
    """(ranks on the busier link, copies of a token that a rank sends over it to experts).

    `alltoall` sends a copy to the rank of each expert, and from there to the other ranks that split
    it. `flex` (DeepEP, HybridEP) sends one to each other node, where a GPU passes it on to each
    rank with any of the experts. NVLink and the network are used at the same time. Nodes count as
    having equal parts of the experts.
    """
    dims = cfg.dims
    ranks = dims.expert * dims.expert_tensor
    nodes = -(-ranks // card.per_node)
    if cfg.model.megatron.get("moe_token_dispatcher_type") == "flex":
        network = (nodes - 1) * reached_share(moe, nodes)
        in_node = (ranks - nodes) * reached_share(moe, dims.expert)
    else:
        network = moe.experts_per_token * (1 - 1 / nodes)
        in_node = moe.experts_per_token * (1 / nodes - 1 / dims.expert + dims.expert_tensor - 1)
    if network / card.network_rate > in_node / card.node_rate:
        return ranks, network
    return min(ranks, card.per_node), in_node


def reached_share(moe: MoeShape, places: int) -> float:
    """Fraction of tokens with an expert in one of `places` equal parts, if chosen evenly.

    A part holds whole groups, or lies in one. A token takes equally many experts from each of its
    groups; random scores reach 1 % fewer nodes than that (DeepSeek-V3 on eight).
    """
    size, of_group = moe.num_experts // places, moe.num_experts // moe.num_groups
    groups, chosen = moe.num_groups, moe.groups_per_token
    if size >= of_group:
        return 1 - comb(groups - size // of_group, chosen) / comb(groups, chosen)
    each = moe.experts_per_token // chosen
    return chosen / groups * (1 - comb(of_group - size, each) / comb(of_group, each))
