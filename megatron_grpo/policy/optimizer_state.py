"""Optimizer state of each parameter: its float32 master weight, and Adam's two moments or Muon's
momentum.

torch's AdamW, the FusedAdam of Transformer Engine and Apex, and Megatron-Core's
HybridDeviceOptimizer, which runs one on the GPU and one on the host, keep them in places and dtypes
of their own, and some only from their first step on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TORCH_ADAM = torch.optim.Adam | torch.optim.AdamW
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""By Megatron's names, of which checkpoints make their keys."""


@dataclass(frozen=True, slots=True)
class SplitFloats:
    """Float32 values in two tensors of 16 bits: bfloat16 weights, and what these lack.

    As integers, the bits of a value are 2^16 times those of its weight, plus the rest. So the
    kernel of Transformer Engine's `store_param_remainders` has them. Nothing is lost.
    """

    weights: Tensor
    """Bfloat16: the values, rounded to nearest."""
    rest: Tensor
    """Int16, of the same shape."""

    dtype = torch.float32
    itemsize = torch.float32.itemsize

    @property
    def shape(self) -> torch.Size:
        return self.weights.shape

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.rest.nbytes

    def view(self, *shape: Any) -> "SplitFloats":
        return SplitFloats(self.weights.view(*shape), self.rest.view(*shape))

    def __getitem__(self, index: Any) -> "SplitFloats":
        return SplitFloats(self.weights[index], self.rest[index])

    def joined(self) -> Tensor:
        """The values, in new memory."""
        return (self._upper() + self.rest).view(torch.float32)

    def copy_(self, values: Tensor) -> None:
        """Set the values, except for the weights: those are already the values, rounded.

        A value half-way between two weights has a rest that is one too large for 16 bits if its
        weight is the lower one, as by rounding to even: then the value loses its last bit.
        """
        rest = values.to(self.rest.device).view(torch.int32) - self._upper()
        self.rest.copy_(rest.clamp_(-(2**15), 2**15 - 1))

    def _upper(self) -> Tensor:
        # While engines have the GPU, one of the two may be on the host.
        return self.weights.to(self.rest.device).view(torch.int16).int() << 16


def shard_of(part: Any, parameter: Tensor) -> Tensor:
    """Shard of a parameter in the optimizer of `part`, one of those that Megatron chains."""
    group, place = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][place]


def states_of(part: Any, parameter: Tensor) -> dict[str, Tensor | SplitFloats]:
    """The master weight, as `param`, and `MOMENTS` or `MOMENTUM` of this rank's range of a
    parameter, flat, in the memory they live in.

    `part` is one of the optimizers that Megatron chains. That memory may be the host's.
    """
    shard = shard_of(part, parameter)
    state = part.optimizer.state[shard]
    master = state.get("master_param", shard).detach()
    if master.dtype == torch.int16:
        master = SplitFloats(shard.detach(), master)
    names = (MOMENTUM,) if MOMENTUM in state else MOMENTS
    return {"param": master, **{name: state[name] for name in names}}


def make_loadable(optimizer: Any, matrices: Collection[Tensor] = ()) -> None:
    """Make the state that would exist only after a first step: loading a checkpoint needs it.

    `matrices`: the parameters of this optimizer that Muon updates in its place.
    """
    for adam in inner_optimizers(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                names = (MOMENTUM,) if parameter in matrices else MOMENTS
                _make_state(adam, group, parameter, names)
    if hasattr(optimizer, "sub_optimizers"):
        optimizer._sync_sub_optimizers_state_to_hdo()


def _make_state(adam: Any, group: dict[str, Any], parameter: Tensor, names: Sequence[str]) -> None:
    if getattr(adam, "use_decoupled_grad", False):
        # Megatron's own call lacks the second argument, which has no default.
        adam.initialize_state(parameter, adam.store_param_remainders)
        return
    state = {name: torch.zeros_like(parameter) for name in names}
    if isinstance(adam, TORCH_ADAM):
        # Where torch itself would put it.
        device = parameter.device if group.get("fused") else torch.device("cpu")
        state = {"step": torch.zeros((), device=device), **state}
    adam.state[parameter] = state


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """The optimizer itself, or those that a HybridDeviceOptimizer divides parameters between."""
    return getattr(optimizer, "sub_optimizers", (optimizer,))


def steps_taken(optimizer: Any) -> int:
    """Number of updates so far, on which Adam's bias correction depends."""
    counts = [
        int(holder["step"])
        for part in optimizer.chained_optimizers
        for adam in inner_optimizers(part.optimizer)
        for holder in (*adam.param_groups, *adam.state.values())
        if "step" in holder
    ]
    return max(counts, default=0)


def set_steps_taken(optimizer: Any, num_steps: int) -> None:
    """Restore `steps_taken`.

    The optimizer's own ``load_state_dict`` would do it too, but Transformer Engine's allocates new
    moments while the old ones are alive.
    """
    for part in optimizer.chained_optimizers:
        for adam in inner_optimizers(part.optimizer):
            if isinstance(adam, TORCH_ADAM):
                for state in adam.state.values():
                    state["step"].fill_(num_steps)
            else:
                for group in adam.param_groups:
                    group["step"] = num_steps
