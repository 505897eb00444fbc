"""A Hugging Face folder, and the JSON files in it."""

import json
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
