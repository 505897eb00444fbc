"""Base class of every table of the config, and what a mistake in one says."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A table of the config: frozen, of known keys and exact types."""

    # Strict, so that `true` for a number is an error rather than 1. Fields of tuples and paths are
    # not strict themselves, as YAML has only lists and texts for them.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every settable key below `section`, with its field."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, UnionType):  # Section | None
            kind = kind.__args__[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def meaning_of(field: FieldInfo) -> str:
    """The docstring of a key, on one line."""
    return " ".join((field.description or "").split())


class Mistake(ValueError):
    """A mistake in a config; each of `remedies`, overrides joined by " and ", mends it alone."""

    def __init__(self, message: str, *remedies: str) -> None:
        super().__init__(message)
        self.remedies = remedies


def within(section: str, remedy: str) -> str:
    """Move the keys of a remedy into a section that has tables of its own."""
    return " and ".join(f"{section}.{each}" for each in remedy.split(" and "))


def as_yaml(value: Any) -> str:
    """Format a value as an override writes it, on one line."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
        return text.removesuffix("\n")
    return value if isinstance(value, str) else json.dumps(value)


Tables = Mapping[str, Any]


def completed(table: Tables, names: Iterable[str], run: Tables) -> dict[str, Any]:
    """Fill keys that a table of `table` lacks from `run`, for the tables `names`."""
    return _changed(table, names, run, lambda own, defaults: {**defaults, **own})


def without_inherited(table: Tables, names: Iterable[str], run: Tables) -> dict[str, Any]:
    """Undo `completed`: leave out the values that equal the run's."""

    def differing(own: Tables, defaults: Tables) -> Tables:
        return {k: v for k, v in own.items() if k not in defaults or defaults[k] != v}

    return _changed(table, names, run, differing)


def _changed(
    table: Tables, names: Iterable[str], run: Tables, change: Callable[[Tables, Tables], Tables]
) -> dict[str, Any]:
    pairs = {name: (table.get(name), run.get(name)) for name in names}
    changed = {
        name: change(own, defaults)
        for name, (own, defaults) in pairs.items()
        if isinstance(own, dict) and isinstance(defaults, dict)
    }
    return {**table, **changed}
