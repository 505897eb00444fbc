"""Replaced attributes of an engine's package, as data: one table for each engine, `PATCHES`.

A test reads the tables, and the source of each original: it fails on the day that one is gone, or
no longer has the line that makes its replacement necessary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce, wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An attribute that our code inside an engine's processes replaces."""

    target: str
    """Module and attribute, such as `starlette.responses:JSONResponse.render`."""
    replacement: Callable[..., Any]
    """A function of the original and of its arguments."""
    because_of: str
    """The line of the original's source that makes it necessary."""
    why: str
    upstream: str = "none filed"
    """The issue or pull request of the engine's project about it."""


def apply(patches: Iterable[Patch]) -> None:
    """Replace all attributes in this process; AttributeError for one that the engine lacks."""
    for patch in patches:
        module, _, path = patch.target.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        setattr(owner, name, _bound(patch.replacement, getattr(owner, name)))


def _bound(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # Not `partial`, which as an attribute of a class would be no method.
    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return replaced
