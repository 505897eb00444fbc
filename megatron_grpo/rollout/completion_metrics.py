"""What a generation reports of its completions, whatever they are worth."""

from collections.abc import Sequence


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """Lengths of the completions in tokens, and the share that met the length limit."""
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }


def dialogue_metrics(num_turns: Sequence[int], finish_reasons: Sequence[str]) -> dict[str, float]:
    """Turns of the model that environments have answered; the shares of dialogues that met
    `environment.max_turns`, and whose environment failed."""
    return {
        "num_turns/mean": sum(num_turns) / len(num_turns),
        "num_turns/max": float(max(num_turns)),
        "num_turns/clipped_ratio": finish_reasons.count("max_turns") / len(finish_reasons),
        "environment/failed_ratio": finish_reasons.count("failed") / len(finish_reasons),
    }
