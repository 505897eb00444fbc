"""Reward functions of the demos; a config names them as `demo/rewards.py:last_number`."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 when the last number in the completion is the answer, else 0."""
    return [
        float(bool(numbers := NUMBER.findall(completion)) and float(numbers[-1]) == float(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Share of the characters that are digits: a reward that even a random model moves."""
    return [
        sum(character.isdigit() for character in completion) / max(1, len(completion))
        for completion in completions
    ]


def share_of_kind(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the characters of the kind that the answer names: digits or capitals."""
    is_wanted = {"digits": str.isdigit, "capitals": str.isupper}
    return [
        sum(map(is_wanted[kind], completion)) / max(1, len(completion))
        for completion, kind in zip(completions, answer, strict=True)
    ]


def share_of_initial(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the characters that equal the answer's first one."""
    return [
        completion.count(wanted[0]) / max(1, len(completion))
        for completion, wanted in zip(completions, answer, strict=True)
    ]
