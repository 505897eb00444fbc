"""Base class of every table of the config."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config: frozen, of known keys and exact types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _refuse_idle(self, table: str, need: str, is_met: bool, *names: str) -> None:
        """Raise ValueError if one of `names` differs from its default while the need is not met.

        Whether a key was given says nothing: a config that was dumped gives all of them.
        """
        for name in () if is_met else names:
            field, value = type(self).model_fields[name], getattr(self, name)
            default = field.get_default(call_default_factory=True, validated_data=dict(self))
            if value != default:
                raise ValueError(
                    f"{table}.{name} {as_yaml(value)} does nothing without {need}: set that, or "
                    f"{table}.{name}={as_yaml(default)}"
                )


def as_yaml(value: Any) -> str:
    """A value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value)


def completed(
    table: Mapping[str, Any], names: Iterable[str], run: Mapping[str, Any]
) -> dict[str, Any]:
    """`table`, of whose tables `names` those that it has take what they leave out from `run`."""
    tables = {}
    for name in names:
        given, defaults = table.get(name), run.get(name)
        if isinstance(given, dict) and isinstance(defaults, dict):
            tables[name] = {**defaults, **given}
    return {**table, **tables}


def refuse_beside(
    what: str, others: Mapping[str, object], instead: str = "leave out one of the two"
) -> None:
    """Raise ValueError for the first of `others`, by what messages call it, that is set: they do
    not go with `what`."""
    for key, is_set in others.items():
        if is_set:
            raise ValueError(f"{key} does not go with {what} yet: {instead}")
