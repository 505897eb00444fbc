"""Optimizer state of each parameter: float32 master weight, and Adam's two moments or Muon's
momentum.

torch's AdamW, the FusedAdam of Transformer Engine and Apex, and Megatron-Core's
HybridDeviceOptimizer (one Adam on the GPU and one on the host) differ in the place and dtype of
the state, and some make it only in their first step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TORCH_ADAM = torch.optim.Adam | torch.optim.AdamW
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""Megatron's names, which are parts of the keys in checkpoints."""


@dataclass(frozen=True, slots=True)
class SplitFloats:
    """Float32 values in two tensors of 16 bits: bfloat16 weights, and the rest.

    As integers, bits(value) = 2^16 bits(weight) + rest: the format of Transformer Engine's kernel
    for `store_param_remainders`.
    """

    weights: Tensor
    """Bfloat16: the values, rounded to nearest."""
    rest: Tensor
    """Int16, in the shape of `weights`."""

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
        """Set `rest` for `values`; `weights` must already hold the rounded values."""
        rest = values.to(self.rest.device).view(torch.int32) - self._upper()
        # A value half-way between two weights may have been rounded down, to even. Its rest is
        # 2^15, one too large for int16: the clamp loses the value's last bit.
        self.rest.copy_(rest.clamp_(-(2**15), 2**15 - 1))

    def _upper(self) -> Tensor:
        # While engines use the GPU, one of the two tensors may be on the host.
        return self.weights.to(self.rest.device).view(torch.int16).int() << 16


def shard_of(part: Any, parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, in `part`: one of the optimizers that Megatron chains."""
    group, place = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][place]


def states_of(part: Any, parameter: Tensor) -> dict[str, Tensor | SplitFloats]:
    """State of this rank's range of a parameter, flat and without a copy: the master weight as
    `param`, and `MOMENTS` or `MOMENTUM`.

    `part`: one of the optimizers that Megatron chains. Tensors may be in host memory.
    """
    shard = shard_of(part, parameter)
    state = part.optimizer.state[shard]
    # FusedAdam keeps the master weight (or its int16 rest, for bfloat16 shards) in the state; of
    # other optimizers the shard itself is the float32 master weight.
    master = state.get("master_param", shard).detach()
    if master.dtype == torch.int16:
        master = SplitFloats(shard.detach(), master)
    names = (MOMENTUM,) if MOMENTUM in state else MOMENTS
    return {"param": master, **{name: state[name] for name in names}}


def make_loadable(optimizer: Any, matrices: Collection[Tensor] = ()) -> None:
    """Make the state that optimizers make in their first step: loading a checkpoint fills it.

    `matrices`: shards of this optimizer that Muon updates in its place.
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
        # torch keeps the count on the host, except for fused kernels.
        device = parameter.device if group.get("fused") else torch.device("cpu")
        state = {"step": torch.zeros((), device=device), **state}
    adam.state[parameter] = state


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """The optimizer itself, or the parts of a HybridDeviceOptimizer."""
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
    """Set the number of updates, on which Adam's bias correction depends: see `steps_taken`."""
    # Not by `load_state_dict`: in Transformer Engine, it allocates new moments while the old ones
    # are alive.
    for part in optimizer.chained_optimizers:
        for adam in inner_optimizers(part.optimizer):
            if isinstance(adam, TORCH_ADAM):
                for state in adam.state.values():
                    state["step"].fill_(num_steps)
            else:
                for group in adam.param_groups:
                    group["step"] = num_steps
