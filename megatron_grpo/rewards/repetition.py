"""Reward `repetition`: a penalty for repeated n-grams."""

from typing import Any


def repetition(
    completions: list[str],
    *,
    repetition_n_grams: int = 3,
    repetition_max_penalty: float = -1.0,
    **_: Any,
) -> list[float]:
    """`repetition_max_penalty` times the share of n-grams that occurred before.

    (1 - distinct / all) * repetition_max_penalty: the n-gram repetition penalty of arXiv
    2502.03373, appendix C.2, over lower-cased words split at whitespace as in Open-R1 and ms-swift,
    from which names and defaults are taken. 0 if there are fewer than n words.
    """
    if repetition_n_grams < 1:
        raise ValueError(f"repetition_n_grams {repetition_n_grams} must be at least 1, such as 3")
    if repetition_max_penalty > 0:
        raise ValueError(
            f"repetition_max_penalty {repetition_max_penalty} would reward repetition: "
            "use at most 0, such as -1.0"
        )
    return [
        repetition_max_penalty * _share_repeated(completion.lower().split(), repetition_n_grams)
        for completion in completions
    ]


def _share_repeated(words: list[str], n: int) -> float:
    n_grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(n_grams)) / len(n_grams) if n_grams else 0.0
