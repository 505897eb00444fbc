"""Values of single tokens of an optimizer step, for people to look at: `train.log_tokens`.

The log has a fixed number of rows, one per token, which rank 0 gives to the first completions of
the optimizer batch, a random choice. Each token is predicted on one rank, which fills in its row,
so the sum over ranks is the whole log, for any layout.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_grpo.algorithm.loss import GRPOLoss, LossTokens

VALUES = ("mask", "logprob", "gap", "ratio", "entropy", "loss_weight", "clipped")
"""Columns of a `TokenLog`."""


def first_rows(lengths: Sequence[int], num_rows: int) -> list[int | None]:
    """Row of the first token of each completion; None for completions without a row.

    `lengths` are in tokens; the last completion with a row may have fewer rows than tokens.

    >>> first_rows([3, 4, 2], 5)
    [0, 3, None]
    """
    firsts = accumulate(lengths, initial=0)
    return [first if first < num_rows else None for first, _ in zip(firsts, lengths, strict=False)]


class TokenLog:
    """One rank's part of the log; masked tokens and tokens of other ranks have rows of zeros.

    `mask` is 1 in filled rows. `logprob` and `entropy` are the current policy's, `ratio` is over
    the old policy, and `gap` is trainer minus engine under the policy that generated. `loss_weight`
    multiplies the token's objective, with importance weights and masks. `clipped` is -1 at the
    lower bound and 1 at the upper.
    """

    def __init__(self, num_rows: int, device: torch.device | str = "cpu") -> None:
        # The extra last row takes all tokens without a row. Selecting by a boolean mask instead
        # would make the CPU wait for the GPU.
        self._rows = torch.zeros(num_rows + 1, len(VALUES), device=device)
        self.values = self._rows[:-1]
        """[rows, values] float32."""

    def add(self, tokens: LossTokens, loss: GRPOLoss, gap: Tensor) -> None:
        """Fill in the rows of a microbatch's tokens that this rank predicted."""
        rows = tokens.log_rows
        if rows is None:
            return
        weight = tokens.weights
        if loss.rollout_weight is not None:
            weight = weight * loss.rollout_weight
        if loss.off_policy is not None:
            weight = weight.masked_fill(loss.off_policy, 0.0)
        if tokens.high_entropy is not None:
            weight = weight.masked_fill(tokens.high_entropy.isneginf(), 0.0)
        values = {
            "mask": torch.ones_like(weight),
            "logprob": tokens.logprobs,
            "gap": gap,
            "ratio": loss.log_ratio.exp(),
            "entropy": tokens.entropy,
            "loss_weight": weight,
            "clipped": loss.clipped_high.int() - loss.clipped_low.int(),
        }
        found = torch.stack([values[name].detach().float() for name in VALUES], dim=1)
        nowhere = len(self.values)
        has_row = (rows >= 0) & (rows < nowhere)
        self._rows.index_copy_(0, rows.where(has_row, nowhere), found)
