"""Built-in reward functions on text and lengths."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any


def exact(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 if the completion equals the answer, ignoring whitespace around both, else 0."""
    return [
        float(completion.strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]


ACCURACY = ("exact", "math_answer")


def _accuracy(name: str) -> Callable[..., Sequence[float | Exception]]:
    if name == "exact":
        return exact
    # Imported here: SymPy takes a second to import, and other functions do not need it.
    from megatron_grpo.rewards.math import math_answer  # noqa: PLC0415

    return math_answer


def cosine(
    completions: list[str],
    completion_ids: list[list[int]],
    answer: list[Any],
    finish_reasons: list[str],
    *,
    cosine_max_len: int,
    cosine_min_len_value_wrong: float = -0.5,
    cosine_max_len_value_wrong: float = 0.0,
    cosine_min_len_value_correct: float = 1.0,
    cosine_max_len_value_correct: float = 0.5,
    accuracy: str = "math_answer",
    boxed: bool = False,
    only_finished: bool = False,
    reward_timeout: float = math.inf,
    **_: Any,
) -> list[float | Exception]:
    """Half a cosine from the value v_0 at length 0 to the value v_L at L = `cosine_max_len` tokens.

    v_L + (v_0 - v_L) * (1 + cos(pi * length / L)) / 2, and v_L beyond L, with separate values for
    correct and wrong completions: CosFn of the cosine length-scaling reward of arXiv 2502.03373,
    which favours short right answers and gives wrong ones room to think. The paper's r_e for length
    L is left out, as in ms-swift, from which names and defaults are taken; there `cosine_max_len`
    defaults to the limit of completions, here `rollout.max_completion_length`. A completion is
    correct if the reward `accuracy`, `math_answer` or `exact`, gives it 1; `boxed` and
    `only_finished` are arguments of math_answer.
    """
    if cosine_max_len < 1:
        raise ValueError(
            f"cosine_max_len {cosine_max_len} must be at least 1: use rollout.max_completion_length"
        )
    if accuracy not in ACCURACY:
        raise ValueError(f"accuracy {accuracy!r} is unknown: use {' or '.join(ACCURACY)}")
    if accuracy != "math_answer" and (boxed or only_finished):
        raise ValueError(
            f"boxed {boxed} and only_finished {only_finished} are for accuracy math_answer: use "
            f"that instead of {accuracy}, or false for both"
        )
    wrong = (cosine_min_len_value_wrong, cosine_max_len_value_wrong)
    correct = (cosine_min_len_value_correct, cosine_max_len_value_correct)
    scores = _accuracy(accuracy)(
        completions,
        answer,
        finish_reasons=finish_reasons,
        boxed=boxed,
        only_finished=only_finished,
        reward_timeout=reward_timeout,
    )
    return [
        score
        if isinstance(score, Exception)
        else _half_cosine(min(len(ids) / cosine_max_len, 1.0), *(correct if score >= 1 else wrong))
        for ids, score in zip(completion_ids, scores, strict=True)
    ]


def _half_cosine(share: float, first: float, last: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def format(completions: list[str], *, pattern: str, **_: Any) -> list[float]:
    """1 if the regular expression `pattern` matches the whole completion, else 0.

    `.` also matches newlines. Give the pattern in the config: `arguments: {pattern: ...}`.
    """
    wanted = re.compile(pattern, re.DOTALL)
    return [float(wanted.fullmatch(completion) is not None) for completion in completions]


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


def soft_overlong(
    completions: list[str],
    completion_ids: list[list[int]],
    *,
    soft_max_length: int,
    soft_cache_length: int,
    **_: Any,
) -> list[float]:
    """0 up to L_max - L_cache tokens, then linearly down to -1 at L_max, and -1 beyond.

    Equation 13 of DAPO (arXiv 2503.14476), with ms-swift's names for L_max (`soft_max_length`) and
    L_cache (`soft_cache_length`). In ms-swift `soft_max_length` defaults to the limit of
    completions, here `rollout.max_completion_length`.
    """
    if not 0 < soft_cache_length < soft_max_length:
        raise ValueError(
            f"soft_cache_length {soft_cache_length} must be above 0 and below soft_max_length "
            f"{soft_max_length}, such as {max(1, soft_max_length // 5)}"
        )
    free = soft_max_length - soft_cache_length
    return [max(-1.0, min(0.0, (free - len(ids)) / soft_cache_length)) for ids in completion_ids]
