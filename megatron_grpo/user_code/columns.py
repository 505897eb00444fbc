"""Columns of the data, which the user's code takes as parameters of the same names."""

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any


def required(parameters: Mapping[str, Parameter]) -> list[str]:
    """The parameters that a call must fill."""
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def taken(given: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Of `given` what can be passed to these parameters: all of it where one is `**columns`."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def missing(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows lack the column `name`, and what there is instead; empty where none does."""
    lacking = [row for row in rows if name not in row]
    if not lacking:
        return ""
    return (
        f"no column of {len(lacking)} of {len(rows)} rows; the first of them has "
        f"{', '.join(lacking[0])}"
    )
