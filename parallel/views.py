"""Views of boxes: in the dimensions of the whole tensor, and of the local one."""

from torch import Tensor

from parallel.layout import Axes


def as_whole(values: Tensor, axes: Axes) -> Tensor:
    """View a box of a local tensor in the dimensions of the whole tensor."""
    if not axes:
        return values
    # A box has extent 1 along local dimensions outside `axes`: index 0 drops them.
    unnamed = [dim for dim in range(values.dim()) if dim not in axes]
    return values.permute(*unnamed, *axes)[(0,) * len(unnamed)]


def as_local(values: Tensor, axes: Axes, num_dims: int) -> Tensor:
    """The inverse of `as_whole` for a box of a local tensor of `num_dims` dimensions."""
    if not axes:
        return values
    # The listed dimensions in local order; the others go between them, with extent 1.
    values = values.permute([axes.index(dim) for dim in sorted(axes)])
    for dim in range(num_dims):
        if dim not in axes:
            values = values.unsqueeze(dim)
    return values
