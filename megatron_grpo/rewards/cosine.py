"""Reward `cosine`: correctness, scaled by the length of the completion."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_grpo.rewards.exact import exact
from megatron_grpo.rewards.math_answer import math_answer

ACCURACY: dict[str, Callable[..., Sequence[float | Exception]]] = {
    "exact": exact,
    "math_answer": math_answer,
}


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
    """Half a cosine from the value at length 0 to the value at L = `cosine_max_len` tokens.

    v_L + (v_0 - v_L) * (1 + cos(pi * length / L)) / 2, with separate values for correct and wrong
    completions: CosFn of the cosine length-scaling reward of arXiv 2502.03373, which favours short
    right answers and gives wrong ones room to think. Names and defaults are ms-swift's, which also
    leaves out the paper's r_e for length L; there `cosine_max_len` defaults to what is
    `rollout.max_completion_length` here. Beyond L the value stays at that of L. A completion is
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
    scores = ACCURACY[accuracy](
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
