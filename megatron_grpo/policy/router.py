"""Routers of a mixture of experts: replay of the engine's choices, and auxiliary losses.

Engine and trainer round differently. Where the scores of two experts are close, they may choose
different experts, and so compute different functions. With rollout routing replay (R3, arXiv
2510.11370), the policy sends each token to the experts that processed it while the engine sampled.
The experts' weights, and the gradients of the router, are still the trainer's own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_grpo.policy.sparse_attention import SparseAttention
from parallel import pipeline_layers
from parallel.groups import Groups
from parallel.packing import PackedBatch

TopK = tuple[Tensor, Tensor]
"""[tokens, topk] each: scores of the chosen experts, and their numbers."""


class RouterReplay:
    """Recorded experts of a router's tokens, in place of Megatron's class of this name.

    Megatron's class keeps the routers of all models of a process in one list, and a recomputed
    forward takes the next routes in line (test_upstream: router_replay). Here a layer binds the
    routes of its microbatch whenever it runs.
    """

    def __init__(self) -> None:
        self.routed_experts: Tensor | None = None
        """[tokens, topk] on this rank; None: the router chooses, as in a microbatch of padding."""
        self.is_on = True

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., TopK],
    ) -> TopK:
        """Called by Megatron with the router's scores [tokens, experts]; raises ValueError if
        engines reported another number of experts than `topk`."""
        if self.routed_experts is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self.routed_experts.long()
        if chosen.shape[1] != topk:
            raise ValueError(
                f"rollout.router_replay: engines reported {chosen.shape[1]} experts of each token, "
                f"but the model has {topk}: start the engines with the same config, or with "
                "--enable-return-routed-experts"
            )
        return scores.gather(1, chosen), chosen


def add_router_replay(chunks: Sequence[GPTModel]) -> None:
    """Make the layers of a model follow the routes in the params of each packed microbatch."""
    for number, layer in enumerate(layer for chunk in chunks for layer in chunk.decoder.layers):
        if not isinstance(layer.mlp, MoELayer):
            continue  # a dense layer, which has a column in the routes all the same
        replay = layer.mlp.router.router_replay = RouterReplay()
        # Megatron passes the params to a layer again when it recomputes the whole of it ...
        layer.register_forward_pre_hook(partial(_bind, replay, number), with_kwargs=True)
        if layer.mlp.moe_layer_recompute:  # ... but not when it recomputes only the experts.
            layer.mlp.moe_layer_recompute = False
            layer.mlp.forward = partial(_checkpointed, replay, layer.mlp.forward)


@contextmanager
def own_choices(chunks: Iterable[GPTModel]) -> Iterator[None]:
    """Let routers and indexers choose meanwhile, whatever routes a microbatch has."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    attentions = [layer.self_attention for layer in layers]
    replays: list[Any] = [
        *(each.mlp.router.router_replay for each in layers if isinstance(each.mlp, MoELayer)),
        *(each.replay for each in attentions if isinstance(each, SparseAttention)),
    ]
    replays = [replay for replay in replays if replay]
    for replay in replays:
        replay.is_on = False
    try:
        yield
    finally:
        for replay in replays:
            replay.is_on = True


def with_own_layers(batch: PackedBatch, groups: Groups) -> PackedBatch:
    """Keep the routes of this pipeline rank's layers only, in the order of its chunks."""
    found: dict[str, Any] = {}
    for name in ("routed_experts", "chosen_tokens"):
        if (of_layers := getattr(batch, name)) is not None:
            own = pipeline_layers(of_layers.shape[1], groups.dims)[groups.coordinates.pipeline]
            found[name] = of_layers[:, [*chain(*own)]]
    return replace(batch, **found) if found else batch


def own_routes(routes: Tensor, local: Tensor, groups: Groups) -> Tensor:
    """Routes [tokens, own layers, topk] of the tokens that this rank's routers see.

    `local`: packed positions of the context rank's tokens.
    """
    # With several tensor ranks, a mixture of experts has sequence parallelism, by
    # `_check_sequence_parallel`: each sees a part of the tokens.
    return routes[local].chunk(groups.dims.tensor)[groups.coordinates.tensor]


def _bind(
    replay: RouterReplay, number: int, _layer: Any, _: tuple[Any, ...], passed: dict[str, Any]
) -> None:
    routes = passed["packed_seq_params"].routed_experts
    replay.routed_experts = routes[:, number] if replay.is_on and routes is not None else None


def _checkpointed(
    replay: RouterReplay, forward: Callable[..., Any], hidden: Tensor, **arguments: Any
) -> Any:
    """Megatron's checkpoint around a mixture, with the routes of this microbatch bound again."""
    # Until the backward, the layer may run other microbatches, and bind their routes.
    routes = replay.routed_experts

    def run(hidden: Tensor) -> Any:
        replay.routed_experts = routes
        return forward(hidden, **arguments)

    return tensor_parallel.checkpoint(run, False, hidden)


BALANCE, Z_LOSS = "load_balancing_loss", "z_loss"
"""Megatron's names."""


class RouterLosses:
    """Routers' losses in an optimizer batch, without coefficients: means over tokens.

    Megatron adds up means over microbatches of any length, in one table of the process
    (test_upstream: router_losses). Here a hook takes them from the table after each forward of a
    router, and weights them by tokens, like their gradient (`forward.py`).
    """

    def __init__(self, chunks: Sequence[GPTModel], names: Sequence[str]) -> None:
        """`names`: see `loss_names`."""
        self._names = names
        size, device = len(names) + 1, next(chunks[0].parameters()).device
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)
        """[losses + 1]: sums of loss * tokens for each loss, then of tokens, over microbatches and
        this rank's routers."""
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, TopKRouter):
                module.register_forward_hook(self._take)

    def clear(self) -> None:
        """Forget all microbatches."""
        self._sums.zero_()

    def means(self) -> dict[str, float]:
        """Means over tokens and routers since `clear`, the same on all ranks; collective.

        `moe/load_balancing_loss` is 1 if all experts have equally many tokens and probability.
        """
        sums = self._sums.clone()
        # Over all ranks: tensor, pipeline and data ranks have different routers or tokens.
        dist.all_reduce(sums)
        *totals, num_tokens = sums.tolist()
        named = zip(self._names, totals, strict=True)
        return {f"moe/{name}": total / num_tokens for name, total in named}

    def _take(self, router: TopKRouter, inputs: tuple[Any, ...], _: Any) -> None:
        if not torch.is_grad_enabled():
            return  # no training, or activations will be recomputed: Megatron counts nothing
        num_tokens = inputs[0].shape[:-1].numel()
        found: list[Tensor] = []
        recorded = get_moe_metrics_tracker().metrics
        for name in self._names:
            value = recorded[name].values[router.layer_number - 1]
            # The balance of a microbatch is a sum over the ranks that share it; the z-loss of each
            # is a mean over its own tokens.
            num_parts = router.tp_cp_group.size() if name == BALANCE else 1
            found.append(value.double() * (num_tokens * num_parts))
            value.zero_()
        found.append(torch.full_like(found[0], num_tokens))
        self._sums += torch.stack(found)


def loss_names(config: TransformerConfig) -> list[str]:
    """Names of the routers' losses with a coefficient; by default none."""
    balances = config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff
    losses = {BALANCE: balances, Z_LOSS: config.moe_z_loss_coeff}
    return [name for name, has in losses.items() if has and config.num_moe_experts is not None]
