"""Replaced attributes of an engine's package, as data: one table for each engine, `PATCHES`.

A test reads the tables and the source of each original: it fails when an original is gone, or no
longer has the line that makes its replacement necessary.
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
    """A function of the original and its arguments."""
    because_of: str
    """Line in the original's source that makes the patch necessary."""
    why: str
    upstream: str = "none filed"
    """Issue or pull request in the engine's project."""


def apply(patches: Iterable[Patch]) -> None:
    """Replace all attributes in this process; AttributeError if the engine lacks an attribute."""
    for patch in patches:
        module, _, path = patch.target.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        setattr(owner, name, _bound(patch.replacement, getattr(owner, name)))


def _bound(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # A `partial` in a class is no method: it would not get `self`.
    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return replaced
