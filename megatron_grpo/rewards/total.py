"""From the scores of several reward functions to one reward."""

from collections.abc import Mapping, Sequence

from megatron_grpo.config.reward_config import RewardFunction


def total_rewards(
    scores: Sequence[Mapping[str, float]], functions: Sequence[RewardFunction]
) -> list[float]:
    """Weighted sum over the functions, one per completion; `scores` are keyed by function label.

    NaN if any function's score is NaN, whatever its weight: such a completion counts as unscored.
    """
    return [
        sum(function.weight * score[function.label] for function in functions) for score in scores
    ]
