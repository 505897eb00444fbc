"""A reward worker's answer to a call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """The scores of one call, NaN where one failed; None when the whole call failed."""

    scores: list[float] | None
    error: str = ""
    """Why the first failed score failed; empty when none failed."""
    is_misuse: bool = False
    """Whether the return value is not a score per completion, so that nothing can be masked."""
    is_spent: bool = False
    """Whether the process has reached its memory limit and must be replaced."""
