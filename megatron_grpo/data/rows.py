"""Reads the rows of a data set: JSONL, Parquet, or a name on the Hugging Face hub."""

import json
import re
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_grpo.config.data import CONVERSION, FILE_SUFFIXES, DataConfig
from megatron_grpo.data.messages import without_nulls

Row = dict[str, Any]
"""One example: its columns by name."""

NUM_SHOWN = 20
BASE64 = "data:image/"
"""Prefix of an image in base64."""


@dataclass(frozen=True)
class Fault:
    """Why a row cannot be used: the kind of fault, and the details of this row."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class InvalidRows:
    """Unusable rows of a data set: counts by kind of fault, and the first few in order."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._first: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self.kinds.total()

    def add(self, index: int, place: str, fault: Fault) -> None:
        """Record a fault of row `index` of the data; `place` names its file and line."""
        self.kinds[fault.kind] += 1
        # Rows arrive out of order: first the unreadable ones, then those that make no prompt.
        insort(self._first, (index, f"{place}: {fault}"))
        del self._first[NUM_SHOWN:]

    @property
    def summary(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())

    @property
    def listing(self) -> str:
        """One line for each of the first rows, in the order of the data, and one for the rest."""
        lines = [text for _, text in self._first]
        if len(self) > NUM_SHOWN:
            lines.append(f"and {len(self) - NUM_SHOWN} more")
        return "".join(f"\n  {line}" for line in lines)


DEFAULT_SPLIT = DataConfig.model_fields["split"].default
SPLITS = frozenset({DEFAULT_SPLIT, "validation", "valid", "val", "dev", "test", "eval"})
"""Split names that the names of files may begin with."""
NUM_NAMED = 10
"""Maximum number of a folder's files in an error message."""
HUB_SECONDS = 10.0
"""Time-out of a request to the hub."""
Numbered = tuple[int, Row | Fault]
"""A row with its number in its file: lines count from 1, rows of a table from 0."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row, and the place that it was read from."""

    index: int
    """Number of the row in the data, from 0; counts unreadable rows, but not blank lines."""
    source: str
    number: int
    row: Row

    @property
    def place(self) -> str:
        return f"{self.source} {self.number}"


def read_rows(data: DataConfig, path: str, invalid: InvalidRows, first: int = 0) -> list[Record]:
    """Read the rows of a .jsonl or .parquet file, of a folder of these, or of a Hugging Face data
    set. `path` is a path of `data`; its rows are numbered from `first`. Unreadable rows are added
    to `invalid`. Raises ValueError if there are no rows, and for an unknown subset or split."""
    records, index = [], first
    for source, rows in _sources(data, path):
        for number, row in rows:
            found = row if isinstance(row, Fault) else _without_nulls(row, data.prompt_column)
            if isinstance(found, Fault):
                invalid.add(index, f"{source} {number}", found)
            else:
                records.append(Record(index, source, number, found))
            index += 1
    if index == first:
        raise ValueError(f"data.path {path} has no rows")
    return records


def first_row(data: DataConfig) -> Row:
    """Read the first readable row; ValueError if there is none."""
    for path in data.paths:
        for _, rows in _sources(data, path.path):
            for _, row in rows:
                if not isinstance(row, Fault):
                    return row
    raise ValueError(f"data.path {data.path} has no rows")


def _without_nulls(row: Row, prompt_column: str) -> Row | Fault:
    """Remove the null fields that tables add to the messages of a row's prompt."""
    chat = row.get(prompt_column)
    if not isinstance(chat, list):
        return row
    try:
        return {**row, prompt_column: without_nulls(chat)}
    except RecursionError:
        return Fault(f"{prompt_column!r} is nested too deeply")


def _sources(data: DataConfig, name: str) -> Iterator[tuple[str, Iterator[Numbered]]]:
    """Yield each source's rows, and a name that row numbers are appended to: `data.jsonl line`."""
    data.check_exists()
    path = Path(name)
    if not path.exists():
        yield f"{name} row", enumerate(_load_from_hub(data, name))
        return
    if data.subset is not None:
        raise ValueError(
            f"data.subset {data.subset} is for data sets on the hub, and data.path {path} is "
            "local: set data.subset=null"
        )
    for file in _files_of_split(path, data.split):
        if file.suffix == ".jsonl":
            yield f"{file} line", _read_jsonl(file)
        else:
            yield f"{file} row", enumerate(_read_parquet(file))


def _files_of_split(path: Path, split: str) -> list[Path]:
    """Find the files of a folder that are named after the split, or all if no name has a split.
    Raises ValueError if only some names have a split, as the split of the others is unclear."""
    if not path.is_dir():
        if split != DEFAULT_SPLIT:
            raise ValueError(
                f"data.split {split} is for a data set on the hub or a folder, and data.path "
                f"{path} is one file: give the file of that split, with data.split={DEFAULT_SPLIT}"
            )
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in FILE_SUFFIXES)
    if not files:
        raise ValueError(
            f"data.path {path} has no {' or '.join(FILE_SUFFIXES)} file in it: {CONVERSION}"
        )
    words = {file: re.split(r"[-_.]", file.name)[0] for file in files}
    if split == DEFAULT_SPLIT and SPLITS.isdisjoint(words.values()):
        return files
    if split not in words.values():
        raise ValueError(
            f"data.path {path} has no file of data.split {split}, such as "
            f"{split}.parquet or {split}-00000-of-00001.parquet: it has {_names(files)}"
        )
    if others := [file for file, word in words.items() if word not in {split, *SPLITS}]:
        raise ValueError(
            f"data.path {path} has files that are named after their split, and {_names(others)}: "
            f"rename these, for example to {split}-{others[0].name}, or remove them"
        )
    return [file for file, word in words.items() if word == split]


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:NUM_NAMED])


def _read_jsonl(file: Path) -> Iterator[Numbered]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse(line)


def _parse(line: bytes) -> Row | Fault:
    try:
        # With -sig: the first line of a file from Windows may begin with a byte order mark.
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Fault("not UTF-8", f"byte {line[error.start]:#x} at column {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return Fault("not JSON", str(error))
    return row if isinstance(row, dict) else Fault("not a JSON object", type(row).__name__)


def _read_parquet(file: Path) -> Iterator[Row | Fault]:
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from _rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet: {error}") from None


def _rows(batch: pyarrow.RecordBatch) -> Iterator[Row | Fault]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        # Arrow does not name the bad row, so each row is read on its own.
        if len(batch) == 1:
            yield Fault("not UTF-8")
            return
        for number in range(len(batch)):
            yield from _rows(batch.slice(number, 1))
        return
    in_json = [field for field in batch.schema if _has_json(field.type)]
    if not in_json:
        yield from rows
        return
    for row in rows:
        try:
            yield row | {each.name: _parsed(row[each.name], each.type) for each in in_json}
        except (ValueError, RecursionError) as error:
            yield Fault("not JSON", str(error))


def _has_json(kind: pyarrow.DataType) -> bool:
    """Whether a column is JSON as text, or contains some: `datasets` writes rows of JSON so."""
    is_json = isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json"
    return is_json or any(_has_json(kind.field(i).type) for i in range(kind.num_fields))


def _parsed(value: Any, kind: pyarrow.DataType) -> Any:
    """Parse the JSON texts inside a value of a table."""
    if value is None or not _has_json(kind):
        return value
    if isinstance(value, str):
        return json.loads(value)
    if isinstance(value, dict):
        return {name: _parsed(each, kind.field(name).type) for name, each in value.items()}
    return [_parsed(each, kind.value_type) for each in value]


def _load_from_hub(data: DataConfig, name: str) -> Iterator[Row]:
    # Imported here because it takes a second, and local files do not need it.
    import datasets  # noqa: PLC0415

    failure, is_offline = _hub_failure(name), datasets.config.HF_HUB_OFFLINE
    try:
        # No argument of `load_dataset` keeps it off the hub, so the global is set: it then loads
        # the newest cached version, with a warning.
        datasets.config.HF_HUB_OFFLINE = is_offline or failure is not None
        try:
            found = datasets.load_dataset(name, data.subset, split=data.split)
        finally:
            datasets.config.HF_HUB_OFFLINE = is_offline
        yield from _undecoded(found)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        subset = f"subset {data.subset}, " if data.subset else ""
        reason = f"{failure}; {error}" if failure else error
        raise ValueError(
            f"data.path {name} is not a local file or folder, and the Hugging Face data set of "
            f"that name ({subset}split {data.split}) cannot be loaded: {reason}. A host without "
            "internet access needs a file or a folder"
        ) from error


def _hub_failure(name: str) -> Exception | None:
    """Ask the hub about a data set; return the error if it does not answer, None otherwise. Without
    this, `datasets` would ask for up to 80 seconds before it turns to its cache."""
    import huggingface_hub  # noqa: PLC0415  # see above

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except (OSError, ValueError):  # refused by the hub, HF_HUB_OFFLINE, or an illegal name
        return None  # `datasets` raises for the same reason, in more detail
    except huggingface_hub.utils.httpx.RequestError as error:
        return error
    return None


def _undecoded(found: Any) -> Iterable[Row]:
    """Iterate over a data set's rows, with images as the bytes and paths that tables store."""
    import datasets  # noqa: PLC0415  # see above

    rows, as_stored = found.to_iterable_dataset(), datasets.Image(decode=False)
    for name, feature in found.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, as_stored)
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            rows = rows.cast_column(name, datasets.List(as_stored))
    return rows
