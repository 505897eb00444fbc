"""Softmax over a vocabulary from hidden states, one tile of logits at a time, and its backward.

A tile is all rows by some columns: the gradient of the columns' weights is then one product, and
only the gradient of the rows accumulates over tiles, in float32. The backward recomputes every
tile, four products in all instead of three, rather than keep logits [rows, vocabulary].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.dtypes import product_dtype
from parallel.tiles import tile_columns


class SoftmaxSums(NamedTuple):
    """Statistics of each row, [n] each, over some of the vocabulary's columns."""

    maximum: Tensor
    """max z."""
    target: Tensor
    """z of the row's own token; 0 if it is not among these columns."""
    sum_exp: Tensor
    """sum of exp x, where x = z - maximum."""
    sum_x_exp: Tensor
    """sum of x exp x."""


@dataclass(frozen=True, kw_only=True)
class LogitTiles:
    """The logits z = hidden weight^T / temperature, computed tile by tile."""

    hidden: Tensor
    """[n, H]"""
    weight: Tensor
    """[V, H] in the dtype of `hidden`: this rank's columns of the vocabulary."""
    width: int
    """Number of columns that are not padding; the rest are outside the softmax."""
    columns: Tensor
    """[n] int64: local column of each row's token; out of range if another rank has it."""
    temperature: float | Tensor
    """One for all rows, or [n]."""
    tile_columns: int | None
    """None chooses by device."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and of all accumulated values."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def scale(self) -> float | Tensor:
        """1 / temperature."""
        if isinstance(self.temperature, Tensor):
            return 1 / self.temperature.to(self.dtype)
        return 1 / self.temperature

    def sums(self) -> SoftmaxSums:
        """Statistics over all columns."""
        add_tile = _for_device(_with_tile, self.weight.device.type)
        scale = self.scale
        zero = torch.zeros(len(self.hidden), dtype=self.dtype, device=self.hidden.device)
        # Separate tensors: torch.compile would compile again for aliased arguments. The minimum is
        # finite: with -inf, the first `shift * sum_exp` would be -inf * 0 = nan.
        sums = SoftmaxSums(zero + torch.finfo(self.dtype).min, zero, zero.clone(), zero.clone())
        rows = self.hidden.to(product_dtype(self.hidden.dtype))
        for part, table, space in self._tiles():
            logits = _product(rows, table.t(), self.dtype, space)
            sums = add_tile(sums, logits, self.columns - part.start, scale, space)
        return sums

    def gradients(
        self,
        log_normalizer: Tensor,
        entropy: Tensor,
        of_logprob: Tensor,
        of_entropy: Tensor | None,
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of `hidden`, in `dtype`, and of `weight`; None where not `needed`.

        They cover only these columns: sum the gradient of `hidden` over tensor ranks. Per row [n]:
        `log_normalizer`, log sum exp z, and `entropy`, both over the whole vocabulary, and the
        incoming gradients `of_logprob` and `of_entropy`.
        """
        gradient_of_tile = _for_device(_gradient_of_tile, self.weight.device.type)
        scale = self.scale
        rows = self.hidden.to(product_dtype(self.hidden.dtype))
        of_hidden = torch.zeros_like(self.hidden, dtype=self.dtype) if needed[0] else None
        of_weight = torch.zeros_like(self.weight) if needed[1] else None
        for part, table, space in self._tiles():
            gradient = gradient_of_tile(
                _product(rows, table.t(), self.dtype, space),
                self.columns - part.start,
                scale,
                log_normalizer,
                entropy,
                of_logprob,
                of_entropy,
                rows.dtype,
                space,
            )
            if of_hidden is not None:
                _add_product(of_hidden, gradient, table)
            if of_weight is not None:
                if rows.dtype == of_weight.dtype:
                    torch.mm(gradient.t(), rows, out=of_weight[part])
                else:
                    of_weight[part] = gradient.t() @ rows
        return of_hidden, of_weight

    def _tiles(self) -> Iterator[tuple[slice, Tensor, "_Space | None"]]:
        """Columns, weights and memory of each tile; no tiles if there are no rows."""
        if len(self.hidden) == 0:
            return
        rows, hidden_size = self.hidden.shape
        columns = self.tile_columns or tile_columns(
            rows, hidden_size, self.width, self.weight.device.type
        )
        dtype = product_dtype(self.weight.dtype)
        space = None
        if not self.weight.is_cuda:
            space = _Space(
                product=None if dtype == self.dtype else torch.empty(rows, columns, dtype=dtype),
                logits=torch.empty(rows, columns, dtype=self.dtype),
                exp=torch.empty(rows, columns, dtype=self.dtype),
            )
        for start in range(0, self.width, columns):
            part = slice(start, min(start + columns, self.width))
            narrowed = space.narrowed(part.stop - part.start) if space else None
            # Converted tile by tile: no second copy of the whole vocabulary.
            yield part, self.weight[part].to(dtype), narrowed


@dataclass(frozen=True)
class _Space:
    """Memory of one tile [n, columns] on a CPU, reused by the next tile.

    Fresh memory costs a page fault for every 4 KB, together up to as long as the product. A GPU's
    allocator reuses freed memory anyway.
    """

    product: Tensor | None
    """Product in the dtype of the factors; None if `logits` has that dtype."""
    logits: Tensor
    exp: Tensor

    def narrowed(self, columns: int) -> "_Space":
        """Front part of the memory, for a tile of `columns`; contiguous, unlike a column slice."""

        def part(whole: Tensor) -> Tensor:
            return whole.view(-1)[: len(whole) * columns].view(-1, columns)

        product = None if self.product is None else part(self.product)
        return _Space(product, part(self.logits), part(self.exp))


def _with_tile(
    sums: SoftmaxSums, logits: Tensor, columns: Tensor, scale: float | Tensor, space: _Space | None
) -> SoftmaxSums:
    """Add a tile's columns to `sums`; z = scale * logits (online softmax, arXiv 1805.02867).

    With `space`, `logits` is `space.logits` and is overwritten.
    """
    maximum = torch.maximum(sums.maximum, logits.amax(dim=1) * scale)
    shift = sums.maximum - maximum
    old = shift.exp()
    at, is_here = _within(columns, logits)
    token = logits.gather(1, at).squeeze(1) * scale * is_here
    x = _add_scaled(-maximum, logits, scale, space)
    exp = torch.exp(x, out=space.exp if space else None)
    sum_exp = exp.sum(dim=1)
    sum_x_exp = exp.mul_(x).sum(dim=1)
    # Under the new maximum, x of earlier columns becomes x + shift.
    return SoftmaxSums(
        maximum,
        sums.target + token,
        sums.sum_exp * old + sum_exp,
        (sums.sum_x_exp + shift * sums.sum_exp) * old + sum_x_exp,
    )


def _gradient_of_tile(
    logits: Tensor,
    columns: Tensor,
    scale: float | Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    dtype: torch.dtype,
    space: _Space | None,
) -> Tensor:
    """The gradient of a tile's logits, with p = softmax z over the whole vocabulary, H its entropy.

    A log-probability contributes (one-hot of the token - p) scale, an entropy - p (log p + H)
    scale, each times its incoming gradient. With `space`, `logits` is `space.logits` and is
    overwritten.
    """
    of_logprob = of_logprob * scale
    log_p = _add_scaled(-log_normalizer, logits, scale, space)
    factor = -of_logprob[:, None]
    if of_entropy is not None:
        of_entropy = of_entropy * -scale
        factor = torch.addcmul(factor + (entropy * of_entropy)[:, None], log_p, of_entropy[:, None])
    gradient = log_p.exp_().mul_(factor)
    if space is None:  # compiled into one kernel; a scatter would split it into three
        is_token = columns[:, None] == torch.arange(logits.shape[1], device=logits.device)
        return torch.where(is_token, gradient + of_logprob[:, None], gradient).to(dtype)
    at, is_here = _within(columns, logits)
    gradient.scatter_add_(1, at, (of_logprob * is_here)[:, None])
    if space.product is None:
        return gradient.to(dtype)
    return space.product.copy_(gradient)


def _add_scaled(
    rows: Tensor, logits: Tensor, scale: float | Tensor, space: _Space | None
) -> Tensor:
    """Rows [n] + scale * logits, for one `scale` or [n] of them; written to `space.logits`."""
    out = space.logits if space else None
    if isinstance(scale, Tensor):
        return torch.addcmul(rows[:, None], logits, scale[:, None], out=out)
    return torch.add(rows[:, None], logits, alpha=scale, out=out)


def _within(columns: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each row's token [n, 1], and whether this tile has it [n]; if not, any column."""
    last = logits.shape[1] - 1
    return columns.clamp(0, last)[:, None], (columns >= 0) & (columns <= last)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, space: _Space | None = None) -> Tensor:
    """Matrix product in `dtype`; a GPU does not first round it to the dtype of the factors."""
    if a.dtype == dtype:
        return torch.mm(a, b, out=space.logits if space else None)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    if space is None:
        return (a @ b).to(dtype)
    return space.logits.copy_(torch.mm(a, b, out=space.product))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:  # the product accumulates; otherwise it is written, read and added
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _product(a, b, total.dtype)


@cache
def _for_device(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`function`, compiled into fused kernels on a GPU, for any number of rows."""
    if kind != "cuda":
        return function
    compiler: Any = torch.compile  # torch 2.13's overloads lack recompile_limit
    # A single row, each temperature and wide tiles compile apart: 3 to 6 kernels in a run. Beyond
    # its limit, 8 by default, torch would compute without kernels and only log it; `fullgraph`
    # makes that an error.
    compiled: Callable[..., Any] = compiler(
        function, dynamic=True, fullgraph=True, recompile_limit=64
    )
    return compiled
