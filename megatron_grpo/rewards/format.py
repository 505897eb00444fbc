"""Reward `format`."""

import re
from typing import Any


def format(completions: list[str], *, pattern: str, **_: Any) -> list[float]:
    """1 if the regular expression `pattern` matches the whole completion, else 0.

    `.` also matches newlines. Give the pattern in the config: `arguments: {pattern: ...}`.
    """
    wanted = re.compile(pattern, re.DOTALL)
    return [float(wanted.fullmatch(completion) is not None) for completion in completions]
