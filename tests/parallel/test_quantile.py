import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distributed import run_ranks
from parallel.collectives import quantile

SHARES = [0.0, 0.2, 0.25, 0.5, 0.731, 0.999, 1.0]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def expected_quantile(values, q):
    # In float64, since torch.quantile interpolates in the dtype of the values.
    return torch.quantile(values.double(), q).item()


@given(values=st.lists(FLOATS, min_size=1, max_size=40), q=st.floats(0, 1))
def test_of_any_numbers_it_is_that_of_torch(values, q, alone):
    values = torch.tensor(values)
    found = quantile(values, q, alone)
    # Both results round when they interpolate between large numbers of opposite signs.
    scale = values.double().abs().max().item()
    assert found == pytest.approx(expected_quantile(values, q), rel=1e-12, abs=1e-12 * scale)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_one_number_is_every_quantile(q, alone):
    assert quantile(torch.tensor([-2.5]), q, alone) == -2.5


def test_of_no_numbers_it_is_below_all(alone):
    assert quantile(torch.zeros(0), 0.5, alone) == -math.inf


def test_equal_numbers_are_met_exactly(alone):
    values = torch.tensor([0.1] * 5 + [0.7] * 4)
    for q in (0.0, 0.3, 0.5):
        assert quantile(values, q, alone) == values[0].item()
    assert quantile(values, 0.9, alone) == values[-1].item()


PARTS = {
    "ties and negative numbers": [[-1.5, 0.0, 0.5, 0.5], [0.5, -0.25, 3e-39], [-0.0, 1e30]],
    "ranks without numbers": [[], [2.0, -1.0, 0.5], []],
    "one number": [[], [], [0.25]],
    "no number": [[], [], []],
    "many": [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (500, 3, 2000)],
}


def quantiles_on_rank(rank):
    return {
        name: [quantile(torch.as_tensor(parts[rank]), q, dist.group.WORLD) for q in SHARES]
        for name, parts in PARTS.items()
    }


def test_over_ranks_it_is_that_of_all_numbers_together():
    ranks = run_ranks(3, quantiles_on_rank)
    for name, parts in PARTS.items():
        values = torch.cat([torch.as_tensor(part) for part in parts])
        expected = (
            [expected_quantile(values, q) for q in SHARES]
            if len(values)
            else [-math.inf] * len(SHARES)
        )
        assert ranks[0][name] == pytest.approx(expected, rel=1e-12), name
        assert ranks[1][name] == ranks[0][name] == ranks[2][name]
