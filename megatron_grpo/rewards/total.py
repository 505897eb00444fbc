"""From the scores of several reward functions, and of the environment, to one reward."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.config.reward_config import ENVIRONMENT_TERM, RewardFunction

if TYPE_CHECKING:
    from megatron_grpo.rollout import Sample


def add_environment_rewards(
    scores: Sequence[dict[str, float]], samples: Sequence["Sample"]
) -> None:
    """Add the environment's reward of each dialogue to its scores, NaN where it failed."""
    for score, sample in zip(scores, samples, strict=True):
        score[ENVIRONMENT_TERM] = sample.environment_reward


def total_rewards(
    scores: Sequence[Mapping[str, float]], functions: Sequence[RewardFunction]
) -> list[float]:
    """Weighted sum over the functions, one per completion; `scores` are keyed by function label.

    NaN if any function's score is NaN, whatever its weight: such a completion counts as unscored.
    """
    return [
        sum(function.weight * score[function.label] for function in functions) for score in scores
    ]
