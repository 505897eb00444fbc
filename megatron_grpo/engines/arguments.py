"""What a config passes on to an engine: names that the engine knows, as flags of a command."""

import ast
import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any


def check_names(
    engine: str,
    table: Mapping[str, Any],
    reserved: Mapping[str, str],
    known: Callable[[], Collection[str]],
    help_text: str,
) -> None:
    """Raise ValueError for a name in the table `rollout.<engine>` that the engine does not know,
    or that is `reserved` for the reason given there."""
    for name in table:
        if name in reserved:
            raise ValueError(f"rollout.{engine}.{name} cannot be set: {reserved[name]}")
        if name not in (names := known()):
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
            hint = f": did you mean {nearest[0]}?" if nearest else f": {help_text}"
            title = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
            raise ValueError(f"rollout.{engine}.{name} is not an engine argument of {title}{hint}")


def fields_of(source: Path, classes: Collection[str] | None = None) -> frozenset[str]:
    """The public fields of these classes, or of all classes, read from their source.

    That takes a tenth of a second; to import it takes many.
    """
    found = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
    ]
    names = {
        field.target.id
        for field in (node for cls in found for node in cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return frozenset(name for name in names if not name.startswith("_"))


def command_flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The flags of a command line that set these arguments; those that are None are left out."""
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                yield flag.replace("--", "--no-", 1)
            case list():
                yield from [flag, *map(str, value)]
            case dict():
                yield f"{flag}={json.dumps(value)}"
            case _:
                yield f"{flag}={value}"
