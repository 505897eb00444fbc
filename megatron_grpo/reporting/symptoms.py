"""Warns, once each, when the metrics of a run show a pattern that docs/symptoms.md explains."""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean

WINDOW = 3
"""Steps in a row over which a metric is averaged, and of which the first ones are remembered."""


@dataclass(frozen=True)
class Symptom:
    """A pattern of one metric, and what it mostly means."""

    metric: str
    heading: str
    """Of docs/symptoms.md."""
    shows: Callable[[float, float], bool]
    """Given the mean over the first `WINDOW` steps and over the last."""
    message: str
    """With the two means as {first} and {last}."""


SYMPTOMS = (
    Symptom(
        "frac_reward_zero_std",
        "nothing-to-learn-from",
        lambda first, last: last >= 0.9,
        "{last:.0%} of the groups have equal rewards, and teach nothing",
    ),
    Symptom(
        "completions/clipped_ratio",
        "completions-are-cut",
        lambda first, last: last >= 0.5,
        "{last:.0%} of the completions reached rollout.max_completion_length",
    ),
    Symptom(
        "entropy",
        "entropy-collapses",
        lambda first, last: last < first / 10,
        "the entropy fell from {first:.2g} to {last:.2g}",
    ),
    Symptom(
        "completions/mean_length",
        "completions-grow",
        lambda first, last: last > 3 * first,
        "completions grew from {first:.0f} to {last:.0f} tokens",
    ),
    Symptom(
        "rollout/logprob_gap_mean",
        "engine-and-trainer-drift-apart",
        lambda first, last: last > max(3 * first, 0.05),
        "log-probabilities of engine and trainer differ by {last:.2g}, at first by {first:.2g}",
    ),
    Symptom(
        "tokens_per_second",
        "steps-become-slower",
        lambda first, last: last < first / 3,
        "throughput fell from {first:.0f} to {last:.0f} tokens per second",
    ),
)


class Symptoms:
    """Looks at the metrics of each step of this process; prints one line per symptom, once."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._told: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of `step`, and warn of what they show for the first time."""
        for symptom in SYMPTOMS:
            if symptom.metric in metrics and symptom.metric not in self._told:
                self._note(symptom, step, metrics[symptom.metric])

    def _note(self, symptom: Symptom, step: int, value: float) -> None:
        begun = self._first[symptom.metric]
        if len(begun) < WINDOW:
            begun.append(value)
        recent = self._last[symptom.metric]
        self._last[symptom.metric].append(value)
        if len(recent) < WINDOW:
            return
        first, last = mean(begun), mean(recent)
        if symptom.shows(first, last):
            self._told.add(symptom.metric)
            message = symptom.message.format(first=first, last=last)
            print(
                f"step {step}: {message}; see docs/symptoms.md#{symptom.heading}", file=sys.stderr
            )
