"""Overrides of keys, `key.sub=value`: the key's type says how the value is read.

The value of a text key is the text as it stands, because overrides are written in a shell:
`data.system_prompt=Answer after ####` must not lose its end to a YAML comment. Other values are
YAML, and so are a quoted text, null and, if the key takes them, lists and tables.
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
"""Numbers that mean what they look like: YAML 1.1 reads 010 as 8, 1:30 as 90, 2026_11 as 202611."""
PLAIN_BOOLS = ("true", "false")
QUOTED = re.compile(r"""\s*('([^']|'')*'|"([^"\\]|\\.)*")\s*(\s#.*)?""", re.DOTALL)
"""A text that is quoted as a whole, with or without a comment behind it."""
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

    Raises ValueError, one line, for a value that YAML cannot read or reads as something other than
    its text.
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
    """Split a dotted key into its first part, as the table has it, and the rest, from the dot on.

    The part is a number for a held-out set called 2024, and has a dot for a source called math.v2.
    """
    # The longest name wins, as math and math.v2 may both be sources.
    own = [each for each in table if f"{key}.".startswith(f"{each}.")]
    first = max(own, key=lambda each: len(str(each)), default=key.partition(".")[0])
    return first, key[len(str(first)) :]


def _members(kind: Any) -> Sequence[Any]:
    """Types of a union, without annotations; for a Literal the types of its values."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (Union, UnionType):
        return [member for each in arguments for member in _members(each)]
    if origin is Literal:
        return [type(each) for each in arguments]
    return [kind]


def _kind_below(kind: Any, name: str) -> Any:
    """Type of the value `name` in a table, or of a list's items if `name` is empty.

    An unknown key counts as text; `parse_config` refuses it after all overrides are applied.
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
    """Whether every scalar of this type, except null, is a text."""
    members = _members(kind)
    is_text = any(member in (str, Path) for member in members)
    return is_text and not any(member in (bool, int, float, Any) for member in members)


def _takes(kind: Any, bracket: str) -> bool:
    """Whether the type has lists, or tables if `bracket` is {."""
    for member in _members(kind):
        origin = get_origin(member) or member
        is_table = origin is dict or (isinstance(origin, type) and issubclass(origin, BaseModel))
        if is_table if bracket == "{" else origin in (list, tuple):
            return True
    return False


def _read(text: str, kind: Any) -> Any:
    """Parse the value of a key of type `kind`; raises ValueError with the reason."""
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
    """Raise ValueError if YAML would drop part of a value, or join its lines."""
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
    """Turn scalars into texts if the type wants texts, and names in tables, too.

    Raises ValueError for a number or truth value that YAML reads as something else.
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
