"""Sizes of the tiles in which `logit_tiles` multiplies. No torch."""

TILE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Maximum number of logits in a tile, and of elements of its weights.

On a CPU, that many float32 values fit into the cache. A GPU adds every tile's product to the
gradient of the rows: 16 bytes of traffic for each 2 * columns operations, which should be small in
comparison.
"""
MIN_COLUMNS = 512
"""Minimum columns of a tile, for any number of rows: narrower products are slow."""
EVEN_COLUMNS = 64
"""Widths of all tiles but the last are multiples: 1,020 take a CPU a seventh longer than 1,024."""


def tile_columns(rows: int, hidden_size: int, width: int, device: str) -> int:
    """Columns of a tile when `width` columns are multiplied with [rows, hidden_size].

    `device` is torch's device type, `cpu` or `cuda`. The last tile may be narrower.
    """
    fitting = TILE_ELEMENTS[device] // max(rows, hidden_size)
    return even_columns(width, max(MIN_COLUMNS, fitting))


def even_columns(width: int, most: int) -> int:
    """Columns of tiles of nearly equal width, about `most`: a multiple of 64."""
    num_tiles = -(-width // most)
    return -(-width // (num_tiles * EVEN_COLUMNS)) * EVEN_COLUMNS
