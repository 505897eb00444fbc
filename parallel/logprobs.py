"""Log-probability and entropy of chosen tokens, from hidden states and a sharded vocabulary.

Results are indexed like tokens, not like the positions that predict them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.logit_tiles import LogitTiles, SoftmaxSums
from parallel.rank_part import Predictions


@dataclass(frozen=True, kw_only=True)
class ChosenTokens:
    """The K selected packed tokens that this context rank predicts: [K] each."""

    positions: Tensor
    """int64, ascending indices into `tokens`; disjoint over the context ranks."""
    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution from which the token was drawn."""

    def whole(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [T], zero elsewhere; sum over context ranks for all T."""
        zeros = self.logprobs.new_zeros(num_tokens)
        logprobs = zeros.index_copy(0, self.positions, self.logprobs)
        return logprobs, zeros.index_copy(0, self.positions, self.entropy)


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    predictions: Predictions,
    *,
    temperature: float | Tensor,
    vocab_size: int,
    tensor_group: dist.ProcessGroup | None,
    tile_columns: int | None = None,
) -> ChosenTokens:
    """Log-probabilities of the selected tokens, and entropies of their distributions.

    With z = hidden weight^T / temperature over the whole vocabulary:
    ``logprob = z[token] - log sum exp z`` and ``entropy = - sum p log p``. Only one tile of logits
    exists at a time (parallel/logit_tiles.py).

    Args:
        hidden: [T / cp, H], any float type, the same on all tensor ranks; or, under sequence
            parallelism, the r-th slice of it, [T / cp / tp, H], on tensor rank r.
        weight: [V_padded / tp, H] of the same type; tensor rank r holds the r-th slice.
        tokens: [T] int64, packed tokens.
        predictions: the selected tokens, and the rows that predict them. Other rows are neither
            communicated nor multiplied. `counts`, one per tensor rank, is read if `hidden` is a
            slice.
        temperature: positive; the sampler's, one for all selected tokens or [K].
        vocab_size: columns from here on are padding and outside the softmax.
        tensor_group: ranks that split the vocabulary; None if one rank holds all of it.
        tile_columns: columns of the vocabulary per tile; None chooses by device.

    Returns:
        The selected tokens, in float32 (float64 for float64 weights), equal on every tensor rank.
        Log-probabilities and entropies are differentiable with respect to `weight` and `hidden`;
        the gradient of `hidden` is summed over tensor ranks.
    """
    rows, positions = predictions.rows, predictions.positions
    counts = None
    if len(hidden) < predictions.num_rows:
        rank, counts = dist.get_rank(tensor_group), predictions.counts
        # `hidden` is slice `rank` of the context rank's positions; `rows` count over all slices.
        rows = rows.split(counts)[rank] - rank * len(hidden)
    logprobs, entropy = _ChosenLogprobs.apply(
        hidden[rows],
        weight,
        tokens[positions],
        temperature,
        vocab_size,
        tensor_group,
        counts,
        tile_columns,
    )
    return ChosenTokens(positions=positions, logprobs=logprobs, entropy=entropy)


class _ChosenLogprobs(torch.autograd.Function):
    """Two all-reduces in the forward, of 1 + 3 scalars per row, and one in the backward, of rows.

    Under sequence parallelism both passes first all-gather the rows, and the backward
    reduce-scatters their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        counts: list[int] | None,
        tile_columns: int | None,
    ) -> tuple[Tensor, Tensor]:
        first, width = _real_columns(len(weight), vocab_size, group)
        tiles = LogitTiles(
            hidden=hidden if counts is None else _gathered(hidden, counts, group),
            weight=weight,
            width=width,
            columns=labels - first,
            temperature=temperature,
            tile_columns=tile_columns,
        )
        maximum, target, sum_exp, sum_x_exp = _over_ranks(tiles.sums(), group)
        log_sum = sum_exp.log()
        entropy = log_sum - sum_x_exp / sum_exp
        # The rank's own rows: the backward gathers the others again.
        ctx.save_for_backward(hidden, weight, tiles.columns, maximum + log_sum, entropy)
        ctx.group, ctx.counts, ctx.width = group, counts, width
        ctx.temperature, ctx.tile_columns = temperature, tile_columns
        ctx.set_materialize_grads(False)
        # In this order: target - (maximum + log_sum) would round log_sum to the digits of maximum.
        return (target - maximum) - log_sum, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradient of an unused output is None, and costs nothing."""
        hidden, weight, columns, log_normalizer, entropy = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_normalizer)
        counts, group = ctx.counts, ctx.group
        tiles = LogitTiles(
            hidden=hidden if counts is None else _gathered(hidden, counts, group),
            weight=weight,
            width=ctx.width,
            columns=columns,
            temperature=ctx.temperature,
            tile_columns=ctx.tile_columns,
        )
        of_hidden, of_weight = tiles.gradients(
            log_normalizer, entropy, of_logprobs, of_entropy, ctx.needs_input_grad[:2]
        )
        if of_hidden is not None:
            partial = of_hidden.to(hidden.dtype)
            if counts is None:
                of_hidden = _all_reduce(partial, dist.ReduceOp.SUM, group)
            else:
                of_hidden = _scattered(partial, counts, group)
        return of_hidden, of_weight, None, None, None, None, None, None


def _over_ranks(sums: SoftmaxSums, group: dist.ProcessGroup | None) -> SoftmaxSums:
    """Combine the sums of all tensor ranks' columns."""
    maximum = _all_reduce(sums.maximum.clone(), dist.ReduceOp.MAX, group)
    shift = sums.maximum - maximum
    scale = shift.exp()
    # Stacked for a single all-reduce; x shifts to the new maximum as in `logit_tiles`.
    rescaled = [
        sums.target,
        sums.sum_exp * scale,
        (sums.sum_x_exp + shift * sums.sum_exp) * scale,
    ]
    return SoftmaxSums(maximum, *_all_reduce(torch.stack(rescaled), dist.ReduceOp.SUM, group))


def _gathered(own: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all tensor ranks; rank r has ``counts[r]`` of them."""
    padded = own.new_zeros(1, max(counts), own.shape[1])  # the collective needs equal sizes
    padded[0, : len(own)] = own
    whole = own.new_empty(len(counts), *padded.shape[1:])
    dist.all_gather_single(whole, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])


def _scattered(partial: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sum over tensor ranks of the rows that were gathered from this rank."""
    padded = partial.new_zeros(len(counts), max(counts), partial.shape[1])
    for part, rows in zip(padded, partial.split(counts), strict=True):
        part[: len(rows)] = rows
    total = torch.empty_like(padded[:1])
    dist.reduce_scatter_single(total, padded, group=group)
    return total[0, : counts[dist.get_rank(group)]]


def _real_columns(
    local_width: int, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """First vocabulary id of this rank's columns, and their number without padding."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    if not (size - 1) * local_width < vocab_size <= size * local_width:
        raise ValueError(
            f"{size} tensor-parallel ranks with {local_width} columns each do not split a "
            f"vocabulary of {vocab_size}: they must hold all of it together, and each at least one "
            "column"
        )
    first = rank * local_width
    return first, min(local_width, vocab_size - first)


def _all_reduce(value: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    """`value` reduced in place over `group`; no communication when one rank holds everything."""
    if group and dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=op, group=group)
    return value
