"""Columns of a microbatch say of every token what is known of its sequence."""

import numpy as np
import pytest
import torch

from parallel.packing import ColumnMap

PLACES = [slice(1, 3), slice(3, 3), slice(5, 6)]


@pytest.mark.parametrize(
    "values", [[0.5, 7.0, 2.0], [torch.tensor([0.5, 0.5]), torch.empty(0), 2.0]], ids=str
)
def test_each_place_has_its_value_and_all_else_has_another(values):
    column = ColumnMap(PLACES, 7).column(values, np.float64, elsewhere=-1)
    assert column.dtype == torch.float64
    assert column.tolist() == [-1, 0.5, 0.5, -1, -1, 2, -1]


def test_values_per_token_keep_their_order():
    column = ColumnMap(PLACES, 6).column([torch.tensor([8, 9]), 4, 3], np.int64)
    assert column.tolist() == [0, 8, 9, 0, 0, 3]


@pytest.mark.parametrize("values", [[1, 2], [torch.ones(2), 2]], ids=["scalars", "tensors"])
def test_a_value_that_is_missing_is_an_error(values):
    with pytest.raises(ValueError):
        ColumnMap(PLACES, 7).column(values)


def test_a_microbatch_of_padding_has_a_column_too():
    assert ColumnMap([], 4).column([], bool, elsewhere=1).tolist() == [True] * 4
