"""The auxiliary losses of a mixture's routers, for the metrics."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_grpo.policy.releases import router_losses

BALANCE, Z_LOSS = "load_balancing_loss", "z_loss"
"""Megatron's names."""


class RouterLosses:
    """What the routers lose in an optimizer batch, without the coefficients: a mean over tokens.

    Megatron adds up these losses over microbatches of any length, in one table of the process, for
    its training script to read and clear. Here they are taken from the table after each forward of
    a router, and weighted by tokens, like their gradient (`schedule.py`).
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._names = _names(chunks[0].config)
        size, device = len(self._names) + 1, next(chunks[0].parameters()).device
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)
        """Of each loss, times tokens; and the tokens. Over microbatches and this rank's routers."""
        for module in (module for chunk in chunks for module in chunk.modules()):
            if self._names and isinstance(module, TopKRouter):
                module.register_forward_hook(self._take)

    def clear(self) -> None:
        """Forget all microbatches."""
        self._sums.zero_()

    def means(self) -> dict[str, float]:
        """Means over tokens and routers since `clear`, the same on all ranks; collective.

        Empty if routers have no losses. `moe/load_balancing_loss` is 1 if all experts have equally
        many tokens and probability.
        """
        if not self._names:
            return {}
        sums = self._sums.clone()
        dist.all_reduce(sums)  # every rank has routers or tokens that no other has
        *totals, num_tokens = sums.tolist()
        named = zip(self._names, totals, strict=True)
        return {f"moe/{name}": total / num_tokens for name, total in named}

    def _take(self, router: TopKRouter, inputs: tuple[Any, ...], _: Any) -> None:
        if not torch.is_grad_enabled():
            return  # no training, or activations will be recomputed: Megatron counts nothing
        num_tokens = inputs[0].shape[:-1].numel()
        found: list[Tensor] = []
        for name in self._names:
            value = router_losses(name)[router.layer_number - 1]
            # The balance of a microbatch is a sum over the ranks that share it; the z-loss of each
            # is a mean over its own tokens.
            num_parts = router.tp_cp_group.size() if name == BALANCE else 1
            found.append(value.double() * (num_tokens * num_parts))
            value.zero_()
        found.append(torch.full_like(found[0], num_tokens))
        self._sums += torch.stack(found)


def _names(config: TransformerConfig) -> list[str]:
    """The losses that routers have; by default none."""
    balances = config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff
    losses = {BALANCE: balances, Z_LOSS: config.moe_z_loss_coeff}
    return [name for name, has in losses.items() if has and config.num_moe_experts is not None]
