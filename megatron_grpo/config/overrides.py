"""Overrides of keys, `key.sub=value`: the key's type says how the value is read.

The value of a key that takes a text is the text as it stands, and any other value is YAML. So are
quotes, null and, where the key takes them, lists and tables. The shell is where people write
overrides, and `data.system_prompt=Answer after ####` shall not lose its end to a YAML comment.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from megatron_grpo.config.yaml_text import Loader
from megatron_grpo.unicode import is_unicode

STR, NULL, BOOL = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool"))
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
PLAIN_NUMBER = re.compile(
    r"[-+]?(0|[1-9]\d*|(\d+\.\d*|\.\d+)(e[-+]?\d+)?|\d+e[-+]?\d+|\.inf)|\.nan", re.IGNORECASE
)
"""Numbers that read as they stand: to YAML 1.1, 010 is 8, 1:30 is 90, and 2026_11 is 202611."""
PLAIN_BOOLS = ("true", "false")
QUOTED = re.compile(r"""\s*('([^']|'')*'|"([^"\\]|\\.)*")\s*(\s#.*)?""", re.DOTALL)
"""A text in quotes as a whole, with or without a comment behind it."""
NULLS = ("", "~", "null", "Null", "NULL")
BRACKETS = {"[": "]", "{": "}"}
SYNTAX = (
    yaml.AnchorToken,
    yaml.TagToken,
    yaml.DirectiveToken,
    yaml.DocumentStartToken,
    yaml.DocumentEndToken,
)
"""Tokens that YAML silently removes from a value."""


def apply_override(table: dict[Any, Any], override: str, section: type[BaseModel]) -> None:
    """Set one `key.sub=value` in the nested table of a section, creating missing tables.

    Raises ValueError, one line, for a value that YAML cannot read or reads as something else than
    what stands there.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} is not of the form key.sub=value")
    if not is_unicode(override):
        raise ValueError(f"override {override!r} is not in UTF-8")
    kind: Any = section
    first, rest = _first_of(table, key)
    while rest:
        table = table.setdefault(first, {})
        if not isinstance(table, dict):
            raise ValueError(f"override {override!r}: {str(first)!r} is a value, not a section")
        kind = _kind_below(kind, str(first))
        first, rest = _first_of(table, rest.removeprefix("."))
    kind = _kind_below(kind, str(first))
    try:
        table[first] = _read(text, kind)
    except ValueError as error:
        raise ValueError(f"override {override!r}: {error}") from None


def _first_of(table: Mapping[Any, Any], key: str) -> tuple[Any, str]:
    """The first part of a dotted key, as the table has it, and the rest, from the dot on.

    It is a number for a held-out set called 2024, and has dots for a source called math.v2.
    """
    own = [each for each in table if f"{key}.".startswith(f"{each}.")]
    first = max(own, key=lambda each: len(str(each)), default=key.partition(".")[0])
    return first, key[len(str(first)) :]


def _members(kind: Any) -> Sequence[Any]:
    """The types of a union, without annotations; those of its values for a Literal."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (Union, UnionType):
        return [member for each in arguments for member in _members(each)]
    if origin is Literal:
        return [type(each) for each in arguments]
    return [kind]


def _kind_below(kind: Any, name: str) -> Any:
    """The type of the value `name` in a table, or of the items of a list if it is empty.

    A text below a key that is not known, which is refused when all overrides are read.
    """
    for member in _members(kind):
        origin, arguments = get_origin(member), get_args(member)
        if member is Any:
            return Any
        if isinstance(member, type) and issubclass(member, BaseModel) and name:
            field = member.model_fields.get(name)
            return field.annotation if field else str
        if origin is dict and name:
            return arguments[1]
        if origin in (list, tuple) and not name:
            return arguments[0]
    return str


def _takes_text(kind: Any) -> bool:
    """Whether every scalar of this type is a text, but for null."""
    members = _members(kind)
    is_text = any(member in (str, Path) for member in members)
    return is_text and not any(member in (bool, int, float, Any) for member in members)


def _takes(kind: Any, bracket: str) -> bool:
    """Whether the type has lists, or for { tables."""
    for member in _members(kind):
        origin = get_origin(member) or member
        is_table = origin is dict or (isinstance(origin, type) and issubclass(origin, BaseModel))
        if is_table if bracket == "{" else origin in (list, tuple):
            return True
    return False


def _read(text: str, kind: Any) -> Any:
    """The value of a key of this type; raises ValueError with the reason."""
    if _takes_text(kind):
        bare = text.strip()
        is_bracketed = BRACKETS.get(bare[:1]) == bare[-1:] and _takes(kind, bare[:1])
        if not (QUOTED.fullmatch(text) or is_bracketed or text == "" or bare in NULLS[1:]):
            return text
    try:
        _refuse_dropped(text)
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _set_types(node, kind, loader)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"not valid YAML: {error.problem}; put a text in single quotes") from None
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _refuse_dropped(text: str) -> None:
    """Raise ValueError for what YAML would leave out of a value, or join."""
    end = 0
    for token in yaml.scan(text, Loader):
        start, between = token.start_mark.index, text[end : token.start_mark.index]
        end = token.end_mark.index
        held = text[start:end]
        if isinstance(token, yaml.ScalarToken):
            is_block = token.style in ("|", ">")
            if not is_block and token.start_mark.line != token.end_mark.line:
                raise ValueError(
                    f"YAML joins the lines of {held!r}: write \\n for a line break, in double "
                    "quotes"
                )
            between += held.partition("\n")[0] if is_block else ""
        if "#" in between:
            comment = between[between.index("#") :].partition("\n")[0]
            raise ValueError(f"YAML drops the comment {comment!r}: leave it out, or use quotes")
        is_explicit_key = isinstance(token, yaml.KeyToken) and held != ""
        if isinstance(token, SYNTAX) or is_explicit_key:
            raise ValueError(f"YAML takes {held!r} for its own syntax: put a text in quotes")


def _set_types(node: yaml.Node, kind: Any, loader: Loader) -> None:
    """Make texts of the scalars that the type wants as texts, and of the names in tables.

    Raises ValueError for a number or a truth value that may have been meant as something else.
    """
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _set_types(item, _kind_below(kind, ""), loader)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise ValueError("a table's keys are names: put a text in quotes")
            name.tag = STR
            _set_types(value, _kind_below(kind, name.value), loader)
    elif node.tag == NULL:
        return
    elif _takes_text(kind):
        node.tag = STR
    else:
        is_odd_number = node.tag in NUMBERS and not PLAIN_NUMBER.fullmatch(node.value)
        is_word = node.tag == BOOL and node.value.lower() not in PLAIN_BOOLS
        if is_odd_number or (is_word and kind is Any):
            value = str(loader.construct_object(node)).lower()
            raise ValueError(
                f"YAML reads {node.value} as {value}: write {value} if that is meant, and a text "
                "in quotes"
            )
