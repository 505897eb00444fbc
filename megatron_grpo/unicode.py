"""Text that can be encoded: JSON, file names and users' code may give half of a surrogate pair."""

from typing import Any, TypeVar

T = TypeVar("T")


def as_unicode(value: T) -> T:
    """A text, or all texts in lists and dicts, with `?` for each half of a surrogate pair.

    UTF-8 has no form for such a half: encoders, tokenizers and files raise.

    >>> as_unicode({"name": ["caf\\udce9"]})
    {'name': ['caf?']}
    """
    replaced: T = _replaced(value)
    return replaced


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value if is_unicode(value) else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_replaced(each) for each in value]
    if isinstance(value, dict):
        return {_replaced(name): _replaced(each) for name, each in value.items()}
    return value


def is_unicode(text: str) -> bool:
    """Whether a text has a form in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
