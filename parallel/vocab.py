"""Log-probability and entropy of chosen tokens under a vocabulary split over tensor-parallel ranks.

The only place that knows that ``tokens[t]`` is predicted at position t - 1 of its sequence. What
leaves this file is in the index space of `tokens`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_SIZE = 64
"""Rows of logits that are worked on at a time: the working copies are [CHUNK_SIZE, V / tp].

Few enough for a CPU's cache (with 49,152 columns in bfloat16, 64 rows take half the time of 256)
and still about a million elements per GPU kernel at a 128k vocabulary over 8 ranks.
"""


def prediction_targets(cu_seqlens: Tensor, context_indices: Tensor) -> Tensor:
    """Packed position of the token that each local position predicts; -1 at the end of a sequence.

    `cu_seqlens` [n + 1] are the packed sequence boundaries, `context_indices` [T / cp] the packed
    positions that this context rank holds, in its own order. Returns int64 [T / cp].
    """
    following = context_indices + 1
    return following.masked_fill(torch.isin(following, cu_seqlens[1:].to(following)), -1)


def local_mask(targets: Tensor, num_tokens: int) -> Tensor:
    """Which packed tokens this context rank predicts, [T] bool; disjoint over the context ranks."""
    mask = torch.zeros(num_tokens + 1, dtype=torch.bool, device=targets.device)
    mask[targets] = True  # -1 falls on the spare last place
    return mask[:-1]


def chosen_logprobs(
    logits: Tensor,
    tokens: Tensor,
    targets: Tensor,
    select: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tensor_group: dist.ProcessGroup | None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the selected tokens, and entropy of the distribution each was drawn from.

    With z = logits / temperature over the whole vocabulary:
    ``logprob = z[token] - log sum exp z`` and ``entropy = - sum p log p``.

    Args:
        logits: [T / cp, V_padded / tp], any float type; tensor rank r holds the r-th slice.
        tokens: [T] int64, packed tokens.
        targets: [T / cp] from `prediction_targets`.
        select: [T] bool, the tokens that are wanted. Rows that predict none cost nothing.
        temperature: positive; the sampler's.
        vocab_size: columns from here on are padding and outside the softmax.
        tensor_group: ranks that share the vocabulary; None when one rank holds it all.
        chunk_size: rows per step of the computation. Peak extra memory is about three float32
            tensors [chunk_size, V_padded / tp], in the backward besides the gradient itself.

    Returns:
        logprobs [T], entropy [T]: float32 (float64 for float64 logits), zero where this context
        rank predicts nothing wanted: the sum over the context group is the whole. Equal on every
        tensor rank. Both differentiate to `logits`.
    """
    wanted = (targets >= 0) & select[targets]
    rows = wanted.nonzero().squeeze(1)
    positions = targets[rows]
    logprobs, entropy = _ChosenLogprobs.apply(
        logits, rows, tokens[positions], temperature, vocab_size, tensor_group, chunk_size
    )
    whole = torch.zeros(len(tokens), dtype=logprobs.dtype, device=logits.device)
    return whole.index_copy(0, positions, logprobs), whole.index_copy(0, positions, entropy)


class _ChosenLogprobs(torch.autograd.Function):
    """One pass over the logits per direction; two collectives forward (1 + 3 scalars per row)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        first, width = _real_columns(logits.shape[1], vocab_size, group)
        columns = (labels - first).clamp(0, width - 1)
        owned = (labels >= first) & (labels < first + width)
        dtype = _accumulation_dtype(logits)
        # For each row, with x = z - max z over this rank's columns:
        maximum = torch.empty(len(rows), dtype=dtype, device=logits.device)  # max z
        target, sum_exp, sum_x_exp = torch.empty(3, len(rows), dtype=dtype, device=logits.device)
        for start in range(0, len(rows), chunk_size):
            part = slice(start, start + chunk_size)
            x = _scaled_rows(logits, rows[part], width, temperature, dtype)
            maximum[part] = x.amax(dim=1)
            x -= maximum[part, None]
            target[part] = x.gather(1, columns[part, None]).squeeze(1)
            exp = x.exp()
            sum_exp[part] = exp.sum(dim=1)
            sum_x_exp[part] = exp.mul_(x).sum(dim=1)

        whole_maximum = _all_reduce(maximum.clone(), dist.ReduceOp.MAX, group)
        shift = maximum - whole_maximum
        scale = shift.exp()
        sums = torch.stack(
            [
                (target + shift) * owned,
                sum_exp * scale,
                (sum_x_exp + shift * sum_exp) * scale,
            ]
        )
        target, sum_exp, sum_x_exp = _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sum_exp.log()

        entropy = log_sum - sum_x_exp / sum_exp
        ctx.save_for_backward(logits, rows, columns, owned, whole_maximum + log_sum, entropy)
        ctx.temperature, ctx.width, ctx.chunk_size = temperature, width, chunk_size
        ctx.set_materialize_grads(False)
        return target - log_sum, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradient to the logits, with p = softmax z and H its entropy.

        Of a log-probability (one-hot of the token - p) / temperature, of an entropy
        - p (log p + H) / temperature. An output that nothing depends on has None: no cost.
        """
        logits, rows, columns, owned, log_normalizer, entropy = ctx.saved_tensors
        dtype = log_normalizer.dtype
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        grad_rows = grad_logprobs / ctx.temperature
        grad = torch.zeros_like(logits)
        for start in range(0, len(rows), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            x = _scaled_rows(logits, rows[part], ctx.width, ctx.temperature, dtype)
            x.sub_(log_normalizer[part, None])
            factor = grad_rows[part, None]
            if grad_entropy is not None:
                factor = factor + (x + entropy[part, None]) * (
                    grad_entropy[part, None] / ctx.temperature
                )
            x.exp_().mul_(-factor)
            at_token = (grad_rows[part] * owned[part])[:, None]
            x.scatter_add_(1, columns[part, None], at_token)
            grad[rows[part], : ctx.width] = x.to(grad.dtype)
        return grad, None, None, None, None, None, None


def _scaled_rows(
    logits: Tensor, rows: Tensor, width: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """A fresh copy [len(rows), width] of ``logits[rows] / temperature`` in `dtype`."""
    return logits[rows, :width].to(dtype).div_(temperature)


def _real_columns(
    local_width: int, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """First vocabulary id of this rank's columns, and how many of them are not padding."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    if not (size - 1) * local_width < vocab_size <= size * local_width:
        raise ValueError(
            f"{size} tensor-parallel ranks with {local_width} columns each do not split a "
            f"vocabulary of {vocab_size}: each must hold at least one real column; "
            f"{-(-vocab_size // size)} columns would be the least"
        )
    first = rank * local_width
    return first, min(local_width, vocab_size - first)


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _all_reduce(value: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    """`value` reduced in place over `group`; no communication when one rank holds everything."""
    if group and dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=op, group=group)
    return value
