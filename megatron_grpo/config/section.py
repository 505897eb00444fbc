"""Base class of every table of the config."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config: frozen, of known keys and exact types."""

    # Strict, so that `true` for a number is an error rather than 1. Fields of tuples and paths are
    # not strict themselves, as YAML has only lists and texts for them.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def as_yaml(value: Any) -> str:
    """Format a value as an override writes it, on one line."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
        return text.removesuffix("\n")
    return value if isinstance(value, str) else json.dumps(value)


def completed(
    table: Mapping[str, Any], names: Iterable[str], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill keys that a table of `table` lacks from `run`, for the tables `names`."""
    tables = {}
    for name in names:
        given, defaults = table.get(name), run.get(name)
        if isinstance(given, dict) and isinstance(defaults, dict):
            tables[name] = {**defaults, **given}
    return {**table, **tables}
