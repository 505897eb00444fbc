"""A function of whole matrices, on ranks with parts of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.ranks.processes import run_ranks
from parallel import Box
from parallel.whole_matrices import WholeMatrices

SHAPES = {"split": (4, 6), "copied": (5, 3), "cut in a row": (3, 4), "alone": (2, 2)}
PARTS = [
    [("split", Box((0, 0), (2, 6))), ("copied", Box((0, 0), (5, 3)))],
    [
        ("cut in a row", Box((0, 0), (1, 4))),
        ("cut in a row", Box((1, 0), (1, 3))),
        ("split", Box((2, 0), (2, 6))),
    ],
    [
        ("copied", Box((0, 0), (5, 3))),
        ("cut in a row", Box((1, 3), (1, 1))),
        ("cut in a row", Box((2, 0), (1, 4))),
        ("alone", Box((0, 0), (2, 2))),
    ],
    [],
]


def whole(name: str) -> Tensor:
    size = SHAPES[name]
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def cubed(matrix: Tensor) -> Tensor:
    return matrix @ matrix.T @ matrix


def replaced(rank: int, max_elements: int) -> tuple[list[Tensor], list[int]]:
    """A rank's parts, and the number of elements in each of its receives."""
    parts = PARTS[rank]
    values = [whole(name)[box.slices].clone() for name, box in parts]
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    exchange, received = dist.all_to_all_single, []

    def counted(incoming: Tensor, *args: Any, **kwargs: Any) -> None:
        received.append(incoming.numel())
        exchange(incoming, *args, **kwargs)

    dist.all_to_all_single = counted
    WholeMatrices(parts, SHAPES, group, cpu, max_elements).apply(cubed, values)
    return values, received


@pytest.mark.parametrize("max_elements", [1, 30, 1000])
def test_every_part_equals_the_function_of_the_whole_matrix(max_elements):
    ranks = run_ranks(4, replaced, max_elements)
    for parts, (values, received) in zip(PARTS, ranks, strict=True):
        assert max(received) <= max(max_elements, 2 * 5 * 3), "or one matrix, with its copies"
        for (name, box), found in zip(parts, values, strict=True):
            assert torch.equal(found, cubed(whole(name))[box.slices]), name
