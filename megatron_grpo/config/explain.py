"""Text about a key: its docstring, values, conflicts, needs, and names in other trainers."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from megatron_grpo.config.config import Config
from megatron_grpo.config.conflicts import CONFLICTS
from megatron_grpo.config.features import keys_of
from megatron_grpo.config.hints import key_hint, meanings_of, other_names
from megatron_grpo.config.needs import IDLE, NEEDS
from megatron_grpo.config.section import as_yaml, fields_of, meaning_of

KINDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    NoneType: "null",
    Any: "any value",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def explain(name: str) -> str:
    """Explain a key, each key with this last part, a section, or a name of another trainer.

    Raises ValueError, with the nearest key, for a name that is none of these.
    """
    fields = dict(fields_of(Config))
    if name in Config.model_fields:
        return _section(name, fields)
    ends = [key for key in fields if key == name or key.endswith(f".{name}")]
    found = [name] if name in ends else ends
    texts = [_key(key, fields[key]) for key in found]
    if not (elsewhere := {} if "." in name and found else meanings_of(name)) and not found:
        raise ValueError(f"{name} is no key: {key_hint(name, [*fields])}")
    foreign = [f"{name} of {trainer}: {text}" for trainer, text in elsewhere.items()]
    return "\n\n".join([*texts, *(["\n".join(foreign)] if foreign else [])])


def default_text(field: FieldInfo) -> str:
    """The default as an override writes it; empty if required or derived from other keys."""
    has_default = not field.is_required() and field.default_factory is None
    return as_yaml(to_jsonable_python(field.default)) if has_default else ""


def kind_text(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type: `integer above 0 or null`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return kind_text(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return " or ".join(map(kind_text, arguments))
    if origin is Literal:
        return " or ".join(map(as_yaml, arguments))
    if origin in (tuple, list):
        return "list of " + kind_text(arguments[0])
    bounds = [
        f"{word} {getattr(each, name):g}"
        for each in metadata
        for name, word in BOUNDS.items()
        if getattr(each, name, None) is not None
    ]
    return " ".join([KINDS.get(kind, "table"), " and ".join(bounds)]).rstrip()


def _section(name: str, fields: dict[str, FieldInfo]) -> str:
    doc = " ".join((Config.model_fields[name].annotation.__doc__ or "").split())
    rows = [
        f"  {key.removeprefix(f'{name}.')}: {meaning_of(field).split('. ')[0].rstrip('.')}"
        for key, field in fields.items()
        if key.startswith(f"{name}.")
    ]
    return "\n".join([f"{name}: {doc}", *rows])


def _key(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default {default_text(field) or 'derived'}"
    head = f"{key}: {kind_text(field.annotation, field.metadata)}; {default}"
    lines = [head, meaning_of(field), *_relations(key), *_names_elsewhere(key)]
    return "\n  ".join(lines)


def _relations(key: str) -> Iterator[str]:
    """Lines on features that need the key, that it needs, and that it excludes."""
    for (feature, needed), row in NEEDS.items():
        if key in keys_of(feature):
            yield f"{feature} needs {needed}: {_reason(row)}"
        elif key in keys_of(needed):
            yield f"{feature} needs it"
    for needed, keys in IDLE.items():
        if key in keys:
            yield f"does nothing without {needed}"
    for pair, row in CONFLICTS.items():
        if any(key in keys_of(each) for each in pair):
            yield f"{pair[0]} does not go with {pair[1]}: {_reason(row)}"


def _reason(row: str | tuple[str, ...]) -> str:
    return row if isinstance(row, str) else row[0]


def _names_elsewhere(key: str) -> Iterator[str]:
    is_named = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)").search
    for trainer, names in other_names().items():
        same = [name for name, text in names.items() if is_named(text) and "no key" not in text]
        if same:
            yield f"{trainer}: {', '.join(same)}"
