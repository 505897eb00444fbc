"""From the steps of a completion's text to its tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.scoring import Scores

Decode = Callable[[Sequence[int]], str]

CONTEXT = 4
"""Tokens decoded before those that are measured: a decoder may drop the space of its first one."""
FIRST_WINDOW = 64


def with_steps(
    samples: Sequence[Sample], scores: Sequence[Scores], decode: Decode
) -> Sequence[Sample]:
    """The samples, with the scores of their steps as rewards of the tokens that end these.

    `decode` makes text of tokens as engines do, without special tokens.
    """
    if not any(score.steps for score in scores):
        return samples
    return [
        replace(sample, step_rewards=tuple(_at_tokens(sample, score, decode)))
        for sample, score in zip(samples, scores, strict=True)
    ]


def _at_tokens(sample: Sample, scores: Scores, decode: Decode) -> Sequence[tuple[int, float]]:
    if not (sample.completion_ids and scores.steps):  # without a token, or a score
        return ()
    ends = token_ends(sample.completion_ids, [end for end, _ in scores.steps[:-1]], decode)
    last = len(sample.completion_ids) - 1  # with the end token
    return [*zip([*ends, last], [score for _, score in scores.steps], strict=True)]


def token_ends(token_ids: Sequence[int], ends: Sequence[int], decode: Decode) -> list[int]:
    """For each of the ascending lengths `ends` of text, the index of the token that reaches it."""
    found: list[int] = []
    start = length = 0
    """Tokens before a place, and characters of their text."""
    for end in ends:
        first = max(0, start - CONTEXT)
        known = length - len(decode(token_ids[first:start]))

        def length_with(token: int, first: int = first, known: int = known) -> int:
            return known + len(decode(token_ids[first : token + 1]))

        # Windows that grow, so that the rest of a long completion is not decoded for each step.
        window, last = FIRST_WINDOW, len(token_ids) - 1
        while start + window < last and length_with(start + window) < end:
            window *= 2
        token = bisect_left(range(last), end, start, min(start + window, last), key=length_with)
        found.append(token)
        start, length = token, length_with(token - 1)  # another step may end with it, too
    return found
