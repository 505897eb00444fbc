"""What a reward worker answers to a call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """The scores of one call, NaN where one failed; None when the whole call failed."""

    scores: list[float] | None
    error: str = ""
    """Why the first score that failed did so; empty when none failed."""
    is_misuse: bool = False
    """Nothing that could be masked: what was returned are no scores of these completions."""
    is_spent: bool = False
    """The process has come to its limit of memory, and is to be replaced."""
