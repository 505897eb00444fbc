"""Metrics of the completions of a generation that do not depend on rewards."""

from collections.abc import Sequence


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """Completion lengths in tokens, and the fraction that reached the length limit.

    Terminated completions are the others; without any, their lengths are 0, as in TRL.
    """
    ended = [n for n, is_cut in zip(lengths, truncated, strict=True) if not is_cut] or [0]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def dialogue_metrics(num_turns: Sequence[int], finish_reasons: Sequence[str]) -> dict[str, float]:
    """Model turns answered by the environment, and the fractions of dialogues that reached
    `environment.max_turns` or whose environment failed."""
    return {
        "num_turns/mean": sum(num_turns) / len(num_turns),
        "num_turns/max": float(max(num_turns)),
        "num_turns/clipped_ratio": finish_reasons.count("max_turns") / len(finish_reasons),
        "environment/failed_ratio": finish_reasons.count("failed") / len(finish_reasons),
    }
