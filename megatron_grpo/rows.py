"""Reading the rows of a data set: JSONL, Parquet, or a name on the Hugging Face hub."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet

from megatron_grpo.config import DataConfig

FILE_SUFFIXES = (".jsonl", ".parquet")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

Row = dict[str, Any]
"""One example: its columns by name."""


def read_rows(data: DataConfig) -> list[Row]:
    """All rows of a .jsonl or .parquet file, of a folder of them, or of a Hugging Face data set."""
    path = Path(data.path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in FILE_SUFFIXES)
        if not files:
            raise ValueError(f"data.path {path} has no {' or '.join(FILE_SUFFIXES)} file in it")
        rows = [row for file in files for row in _read_file(file)]
    elif path.is_file():
        rows = list(_read_file(path))
    else:
        rows = _read_hub(data)
    if not rows:
        raise ValueError(f"data.path {data.path} has no rows")
    return rows


def _read_file(file: Path) -> Iterable[Row]:
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".parquet":
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    raise ValueError(f"data.path {file} is neither {' nor '.join(FILE_SUFFIXES)}")


def _read_jsonl(file: Path) -> Iterable[Row]:
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file} line {number} is {type(row).__name__}, not an object")
            yield row


def _read_hub(data: DataConfig) -> list[Row]:
    if data.path.endswith(FILE_SUFFIXES) or not HUB_NAME.fullmatch(data.path):
        raise ValueError(f"data.path {data.path} does not exist")
    # Imported here because it takes a second, which local files need not wait for.
    import datasets  # noqa: PLC0415

    try:
        return list(datasets.load_dataset(data.path, data.subset, split=data.split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.path {data.path} is no file or folder here, and the Hugging Face data set of "
            f"that name (subset {data.subset}, split {data.split}) cannot be loaded: {error}"
        ) from error
