"""How many columns a tile of logits has. No torch: the planner of memory asks as well."""

TILE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Logits of a tile, and elements of its weights, at most. As float32 the former is what a CPU's
cache holds. A GPU adds every tile's product to the gradient of the rows: 16 bytes of traffic for
each 2 * columns operations, which should be few beside them.
"""
MIN_COLUMNS = 512
"""Of a tile, however many rows there are: narrower products are slow."""
EVEN_COLUMNS = 64
"""All tiles but the last have multiples of these: 1,020 take a CPU a seventh longer than 1,024."""


def tile_columns(rows: int, hidden_size: int, width: int, device: str) -> int:
    """Columns of a tile where `width` of them are multiplied with [rows, hidden_size].

    `device` is torch's word for its kind, `cpu` or `cuda`. The last tile may be narrower.
    """
    fitting = TILE_ELEMENTS[device] // max(rows, hidden_size)
    return even_columns(width, max(MIN_COLUMNS, fitting))


def even_columns(width: int, most: int) -> int:
    """Columns of tiles of nearly one width, about `most`: 64 times a whole number."""
    num_tiles = -(-width // most)
    return -(-width // (num_tiles * EVEN_COLUMNS)) * EVEN_COLUMNS
