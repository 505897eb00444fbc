"""Views of boxes: in the dimensions of the whole tensor, of the local one, and as matrices."""

from itertools import chain

from torch import Tensor

from parallel.layout import Axes


def as_whole(values: Tensor, axes: Axes) -> Tensor:
    """View a box of a local tensor in the dimensions of the whole tensor."""
    if not axes:
        return values
    unnamed = [dim for dim in range(values.dim()) if dim not in axes]
    return values.permute(*unnamed, *axes)[(0,) * len(unnamed)]


def as_local(values: Tensor, axes: Axes, num_dims: int) -> Tensor:
    """The inverse of `as_whole` for a box of a local tensor of `num_dims` dimensions."""
    if not axes:
        return values
    values = values.permute([axes.index(dim) for dim in sorted(axes)])
    for dim in range(num_dims):
        if dim not in axes:
            values = values.unsqueeze(dim)
    return values


def matrices_of(values: Tensor) -> list[Tensor]:
    """Split `values` into views [rows, columns], in order."""
    if values.dim() > 2:
        return [*chain.from_iterable(map(matrices_of, values))]
    return [values if values.dim() == 2 else values.unsqueeze(0)]
