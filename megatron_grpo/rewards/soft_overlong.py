"""Reward `soft_overlong`: a punishment that begins before a completion is too long."""

from typing import Any


def soft_overlong(
    completions: list[str],
    completion_ids: list[list[int]],
    *,
    soft_max_length: int,
    soft_cache_length: int,
    **_: Any,
) -> list[float]:
    """0 up to L_max - L_cache tokens, from there down in a line to -1 at L_max, and -1 beyond.

    Equation 13 of DAPO (arXiv 2503.14476), L_max being `soft_max_length` and L_cache
    `soft_cache_length`, as ms-swift calls them; there `soft_max_length` is by default what here is
    `rollout.max_completion_length`.
    """
    if not 0 < soft_cache_length < soft_max_length:
        raise ValueError(
            f"soft_cache_length {soft_cache_length} must be above 0 and below soft_max_length "
            f"{soft_max_length}, such as {max(1, soft_max_length // 5)}"
        )
    free = soft_max_length - soft_cache_length
    return [max(-1.0, min(0.0, (free - len(ids)) / soft_cache_length)) for ids in completion_ids]
