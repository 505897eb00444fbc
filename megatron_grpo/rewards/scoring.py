"""Scores of a generation as answers of workers arrive, and weighted sums."""

import reprlib
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan, nan
from typing import Any

from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.functions import Answer

GIVEN: dict[str, Callable[[Sample], Any]] = {
    "completions": lambda sample: sample.text,
    "prompts": lambda sample: sample.prompt.text,
    "completion_ids": lambda sample: list(sample.completion_ids),
    "finish_reasons": lambda sample: sample.finish_reason,
    "prompt_messages": lambda sample: sample.prompt.messages,
}
"""Columns that the run provides, as functions of a sample."""
ONLY_BY_NAME = "prompt_messages"
"""Column left out of `**columns`: it repeats `prompts`."""
SHORTENED = reprlib.Repr()
SHORTENED.maxstring = 200
SHORTENED.maxlist = 4


class RewardError(ValueError):
    """A reward function has failed (the text names it and the prompt), or cannot be used."""


@dataclass(frozen=True)
class Call:
    """Call of a function (by index) for one prompt; `places` are its indices in `samples`."""

    function: int
    places: Sequence[int]
    samples: Sequence[Sample]

    def columns(self, accepted: Collection[str] | None) -> dict[str, list[Any]]:
        """`completions` and the `accepted` columns (None: all), one value per completion. Others
        are not sent: token ids are most of a generation's bytes."""
        group = [self.samples[place] for place in self.places]

        def is_sent(name: str) -> bool:
            return accepted is None or name == "completions" or name in accepted

        row = {name: [value] * len(group) for name, value in group[0].prompt.row.items()}
        given = {name: get for name, get in GIVEN.items() if accepted or name != ONLY_BY_NAME}
        return {name: column for name, column in row.items() if is_sent(name)} | {
            name: [get(sample) for sample in group] for name, get in given.items() if is_sent(name)
        }


class Scores(dict[str, float]):
    """Scores of a completion by function label; NaN for a failed score."""

    steps: Sequence[tuple[int, float]] = ()
    """(end in the text, score) of each step, if a function scores steps."""


def check_failed(num_failed: int, num_completions: float, cfg: RewardConfig) -> None:
    """Raise RewardError if more than `cfg.max_failed_fraction` of the completions have no score."""
    share, limit = num_failed / num_completions, cfg.max_failed_fraction
    if share <= limit:
        return
    raise RewardError(
        f"{num_failed} of {num_completions} completions have no score so far: more than "
        f"reward.max_failed_fraction {limit} allows: fix the failure shown above, or raise that "
        "limit if failures are to be expected (it must be below 1)"
    )


class Scoring:
    """Collects the scores of `samples`; samples of one prompt must be adjacent. `reported` are the
    indices of functions with a printed failure."""

    def __init__(
        self,
        samples: Sequence[Sample],
        cfg: RewardConfig,
        reported: set[int],
        num_completions: float,
    ) -> None:
        self._num_completions = num_completions
        self._cfg = cfg
        self._reported = reported
        self._failed: set[int] = set()
        self._first_error = ""
        # Filled with NaN at once, so that labels are in the order of the config, not of answers.
        self.scores = [Scores({each.label: nan for each in cfg.functions}) for _ in samples]
        groups = groupby(range(len(samples)), key=lambda place: samples[place].prompt.index)
        self.calls = [
            Call(function, places, samples)
            for places in [list(group) for _, group in groups]
            for function in range(len(cfg.functions))
        ]

    def record(self, call: Call, answer: Answer) -> None:
        """Enter the answer to a call into `scores`. Raises RewardError for a result that cannot be
        masked, and when more scores have failed than `reward.max_failed_fraction` allows."""
        label = self._cfg.functions[call.function].label
        prompt = call.samples[call.places[0]].prompt
        error = (
            f"reward function {label} on prompt {prompt.index} "
            f"({SHORTENED.repr(prompt.text)}): {answer.error}"
        )
        if answer.is_misuse:
            raise RewardError(error)
        scores = [nan] * len(call.places) if answer.scores is None else answer.scores
        for place, score in zip(call.places, scores, strict=True):
            self.scores[place][label] = score
            if isnan(score):
                self._failed.add(place)
        if answer.steps:
            for place, steps in zip(call.places, answer.steps, strict=True):
                self.scores[place].steps = steps
        if answer.error:
            unscored = [call.samples[place].text for place in call.places if place in self._failed]
            error += f"\ncompletions: {SHORTENED.repr(unscored)}"
            self._first_error = self._first_error or error
            try:
                check_failed(len(self._failed), self._num_completions, self._cfg)
            except RewardError as too_many:
                raise RewardError(f"{self._first_error}\n{too_many}") from None
            if call.function not in self._reported:
                self._reported.add(call.function)
                print(
                    f"megatron-grpo: {error}\nCompletions without a score are masked; further "
                    "failures of this function are not shown",
                    file=sys.stderr,
                    flush=True,
                )


def total_rewards(
    scores: Sequence[Mapping[str, float]],
    functions: Sequence[RewardFunction],
    clip_range: tuple[float, float] | None = None,
) -> list[float]:
    """Weighted sum over the functions for each completion, clipped to `clip_range` if given; NaN if
    any score is NaN: the completion counts as unscored."""
    # A function of weight 0 counts, too: 0 * NaN is NaN.
    totals = [sum(each.weight * score[each.label] for each in functions) for score in scores]
    if clip_range is None:
        return totals
    low, high = clip_range
    return [total if isnan(total) else min(max(total, low), high) for total in totals]


Decode = Callable[[Sequence[int]], str]

CONTEXT = 4
"""Tokens decoded before the measured ones: a decoder may drop the space of its first token."""
FIRST_WINDOW = 64


def with_steps(
    samples: Sequence[Sample], scores: Sequence[Scores], decode: Decode
) -> Sequence[Sample]:
    """Samples with the scores of steps as `step_rewards`, at the last token of each step. `decode`
    leaves out special tokens, as engines do."""
    if not any(score.steps for score in scores):
        return samples
    return [
        replace(sample, step_rewards=tuple(_at_tokens(sample, score, decode)))
        if score.steps
        else sample
        for sample, score in zip(samples, scores, strict=True)
    ]


def _at_tokens(sample: Sample, scores: Scores, decode: Decode) -> Sequence[tuple[int, float]]:
    if not sample.completion_ids:
        return ()
    ends = token_ends(sample.completion_ids, [end for end, _ in scores.steps[:-1]], decode)
    last = len(sample.completion_ids) - 1  # not searched: the last step includes the end token
    return [*zip([*ends, last], [score for _, score in scores.steps], strict=True)]


def token_ends(token_ids: Sequence[int], ends: Sequence[int], decode: Decode) -> list[int]:
    """Index of the token that reaches each of the ascending text lengths `ends`."""
    found: list[int] = []
    start = length = 0
    """Tokens before a place, and characters of their text."""
    for end in ends:
        first = max(0, start - CONTEXT)
        # Only a window is decoded: from the beginning, each step would take longer.
        known = length - len(decode(token_ids[first:start]))

        def length_with(token: int, first: int = first, known: int = known) -> int:
            return known + len(decode(token_ids[first : token + 1]))

        # Doubled until it reaches `end`: decoding to the completion's end for each step would be
        # quadratic.
        window, last = FIRST_WINDOW, len(token_ids) - 1
        while start + window < last and length_with(start + window) < end:
            window *= 2
        token = bisect_left(range(last), end, start, min(start + window, last), key=length_with)
        found.append(token)
        start, length = token, length_with(token - 1)  # one token may end several steps
    return found
