"""Reward `exact`."""

from typing import Any


def exact(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion equals the answer, ignoring whitespace around both, else 0."""
    return [
        float(completion.strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]
