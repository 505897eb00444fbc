"""Sizes of tiles of logits."""

import pytest

from parallel.tiles import even_columns, tile_columns


@pytest.mark.parametrize(
    ("width", "most", "expected"),
    [(151_936, 1024, 1024), (1000, 512, 512), (64, 512, 64), (5, 512, 64), (40_960, 768, 768)],
)
def test_tiles_have_one_width_that_products_run_fast_with(width, most, expected):
    columns = even_columns(width, most)
    assert columns == expected
    assert columns % 64 == 0
    assert -(-width // columns) <= -(-width // most)


@pytest.mark.parametrize(
    ("rows", "hidden_size", "expected"), [(2048, 64, 1024), (64, 1024, 2048), (1 << 20, 64, 512)]
)
def test_a_tile_has_few_logits_and_few_weights(rows, hidden_size, expected):
    assert tile_columns(rows, hidden_size, 1 << 17, "cpu") == expected
