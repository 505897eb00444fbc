"""Columns of the data, passed to user code as parameters of the same name."""

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any


def required(parameters: Mapping[str, Parameter]) -> list[str]:
    """The parameters that a call must provide."""
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def accepted(parameters: Mapping[str, Parameter]) -> list[str] | None:
    """Names of the columns that these parameters accept; None: all, since one is `**columns`.

    `**_` accepts none: by its name, nothing reads it.
    """
    catch_all = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    if catch_all and catch_all != ["_"]:
        return None
    return [name for name in parameters if name not in catch_all]


def taken(given: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """The part of `given` that these parameters accept."""
    names = accepted(parameters)
    return {name: value for name, value in given.items() if names is None or name in names}


def missing(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows lack column `name`, and the columns of the first; empty if none lacks it."""
    lacking = [row for row in rows if name not in row]
    if not lacking:
        return ""
    return (
        f"{len(lacking)} of {len(rows)} rows have no such column; the first of them has "
        f"{', '.join(lacking[0])}"
    )
