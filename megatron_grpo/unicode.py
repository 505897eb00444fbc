"""Text that can be encoded: JSON, file names and users' code may hold half of a surrogate pair."""

from typing import Any


def as_unicode[T](value: T) -> T:
    r"""Replace each half of a surrogate pair by `?`, in a text or in all texts of lists and dicts.

    UTF-8 cannot encode such a half: encoders, tokenizers and files raise.

    >>> as_unicode({"name": ["caf\udce9"]})
    {'name': ['caf?']}
    """
    found: Any = value
    if isinstance(value, str):
        found = value.encode(errors="replace").decode()
    elif isinstance(value, list):
        found = [as_unicode(each) for each in value]
    elif isinstance(value, dict):
        found = {as_unicode(name): as_unicode(each) for name, each in value.items()}
    return found


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
