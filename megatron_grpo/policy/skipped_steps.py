"""Optimizer steps skipped for NaN or infinity: how many in a row, and which value was the first.

Only a skipped step inspects every tensor.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import hf_tensors
from checkpoint_convert.peft import weight_of
from megatron_grpo.policy.model import Policy
from parallel.collectives import broadcast_text
from parallel.words import counted


class SkippedSteps:
    """Count of skipped steps in a row, equal on all ranks; checkpoints save `num_in_a_row` only."""

    def __init__(self, limit: int, num_in_a_row: int = 0) -> None:
        self.limit = limit
        self.num_in_a_row = num_in_a_row
        self._causes: list[str] = []

    def count(self, cause: str | None) -> None:
        """Count a step, skipped for `cause`, or taken if that is None.

        Raises FloatingPointError with all causes after `limit` skipped steps in a row.
        """
        if cause is None:
            self.num_in_a_row = 0
            self._causes.clear()
            return
        self.num_in_a_row += 1
        self._causes.append(cause)
        if self.num_in_a_row >= self.limit:
            earlier = self.num_in_a_row - len(self._causes)
            before = [f"{earlier} before this run was resumed"] if earlier else []
            raise FloatingPointError(
                f"skipped {counted(self.num_in_a_row, 'optimizer step')} in a row, and "
                f"train.max_skipped_steps is {self.limit}: " + "; ".join([*before, *self._causes])
            )


LARGEST_VALUE = 1e12
"""Bound for values of a gradient: a norm overflows float32 only if a value is larger."""


def name_nonfinite(policy: Policy, losses: Sequence[Tensor], device: torch.device) -> str:
    """Name the loss or gradient that first became non-finite; collective over all ranks.

    `losses`: of this rank's microbatches. Losses come first, then gradients from the last layer to
    the first: in a backward pass one corrupts the next. Zeroes part of the gradient buffers.
    """
    urgency, text = _first_nonfinite(policy, losses)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # One all-reduce finds the highest urgency and, among equals, the lowest rank.
    first = torch.tensor((urgency + 1) * num_ranks - 1 - rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX)
    source = num_ranks - 1 - int(first) % num_ranks
    return f"{broadcast_text(text, source)} on rank {source}"


def _first_nonfinite(policy: Policy, losses: Sequence[Tensor]) -> tuple[int, str]:
    """(urgency, text) of the first non-finite value in the order of computation; (-1, "nothing").

    Urgency is 2 * (number of tensors) for a loss; for the gradient of the n-th tensor 2 n, or
    2 n + 1 if this rank's own contribution is broken. The backward pass goes from large n to small.
    """
    order = {name: number for number, name in enumerate(hf_tensors(policy.shape))}
    found = [(-1, "nothing")]
    for number, loss in enumerate(losses):
        if not loss.isfinite():
            found.append((2 * len(order), f"the loss of microbatch {number} is {float(loss)}"))
            break
    found += [(2 * order[name], text) for name, text in _broken_gradients(policy)]
    # The sum over data ranks may have been corrupted by another rank; what this rank contributed
    # to it is stronger evidence.
    policy.zero_summed_gradient()
    found += [(2 * order[name] + 1, text) for name, text in _broken_gradients(policy)]
    return max(found, key=lambda one: one[0])


def _broken_gradients(policy: Policy) -> Iterator[tuple[str, str]]:
    """(Hugging Face name, description) of each weight with a non-finite gradient on this rank."""
    parameters = policy.saved_parameters()
    layout = policy.adapters.layout if policy.adapters else policy.layout
    for piece in layout.pieces:
        if not parameters[piece.local].requires_grad:
            continue
        gradient: Tensor = parameters[piece.local].main_grad  # type: ignore[attr-defined]
        values = gradient[piece.local_box.slices]
        broken = values[~(values.abs() <= LARGEST_VALUE)]  # not `>`: NaN compares false
        if len(broken):
            yield (
                weight_of(piece.tensor),
                f"the gradient of {piece.tensor} has {len(broken)} of {values.numel()} values that "
                f"are NaN, infinite or beyond {LARGEST_VALUE:.0e}, the first {broken[0]:.1e},",
            )
