"""A Hugging Face folder, the JSON files in it, and typed values from these.

A value of another type is a ValueError that names its key.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is an existing folder."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give its folder")
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist: give a Hugging Face model folder, such as one made by "
            "`hf download OWNER/NAME --local-dir FOLDER`"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError, naming the file, if it is missing or malformed."""
    check_folder(path.parent)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a Hugging Face model folder")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # arrays can be nested arbitrarily deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object")
    return value


def integer(path: Path, values: Mapping[str, Any], key: str, minimum: int = 1) -> int:
    """Read an integer of at least `minimum`."""
    value = values.get(key)
    # Not isinstance: true and false are integers in Python.
    if type(value) is not int or value < minimum:
        raise ValueError(f"{path}: {key} is {value!r}; it must be an integer of at least {minimum}")
    return value


def even(path: Path, values: Mapping[str, Any], key: str) -> int:
    """Read an even integer: RoPE rotates pairs."""
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
