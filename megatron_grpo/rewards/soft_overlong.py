"""Reward `soft_overlong`: a length penalty that begins before the limit is reached."""

from typing import Any


def soft_overlong(
    completions: list[str],
    completion_ids: list[list[int]],
    *,
    soft_max_length: int,
    soft_cache_length: int,
    **_: Any,
) -> list[float]:
    """0 up to L_max - L_cache tokens, then linearly down to -1 at L_max, and -1 beyond.

    Equation 13 of DAPO (arXiv 2503.14476), where L_max is `soft_max_length` and L_cache is
    `soft_cache_length`, the names of ms-swift; there `soft_max_length` defaults to what is
    `rollout.max_completion_length` here.
    """
    if not 0 < soft_cache_length < soft_max_length:
        raise ValueError(
            f"soft_cache_length {soft_cache_length} must be above 0 and below soft_max_length "
            f"{soft_max_length}, such as {max(1, soft_max_length // 5)}"
        )
    free = soft_max_length - soft_cache_length
    return [max(-1.0, min(0.0, (free - len(ids)) / soft_cache_length)) for ids in completion_ids]
