"""Typed values from a config file; a value of another type is a ValueError that names its key."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def integer(path: Path, values: Mapping[str, Any], key: str, minimum: int = 1) -> int:
    """Read an integer of at least `minimum`."""
    value = values.get(key)
    if type(value) is not int or value < minimum:
        raise ValueError(f"{path}: {key} is {value!r}; it must be an integer of at least {minimum}")
    return value


def even(path: Path, values: Mapping[str, Any], key: str) -> int:
    """Read the size of what RoPE rotates."""
    value = integer(path, values, key)
    if value % 2:
        raise ValueError(f"{path}: {key} is {value}; it must be even, as RoPE rotates pairs")
    return value


def number(path: Path, values: Mapping[str, Any], key: str) -> float:
    """Read a finite number above 0; JSON files may also hold NaN and Infinity."""
    value: Any = values.get(key)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{path}: {key} is {value!r}; it must be a finite number above 0")
    return float(value)


def boolean(path: Path, values: Mapping[str, Any], key: str) -> bool:
    """Read true or false."""
    value = values.get(key)
    if type(value) is not bool:
        raise ValueError(f"{path}: {key} is {value!r}; it must be true or false")
    return value


def token_ids(path: Path, values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read null, one token id, or a list of them."""
    value = values[key]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(index) is not int or index < 0 for index in ids):
        raise ValueError(f"{path}: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
