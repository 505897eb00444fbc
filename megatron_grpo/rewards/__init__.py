"""Rewards: completions in, one score per completion and function out.

A reward function is called once per prompt with all its completions, by keyword:

    def my_reward(completions: list[str], prompts: list[str], **columns: list) -> list[float]

`columns` are those of the data row, one value per completion, the reference answer under `answer`.
A function may name only the parameters that it uses. It must return a list (or an array) of one
finite number per completion, in time and within its memory: anything else stops the run, and is
never a zero.

It runs in a process of its own, with the rights of the user who trains: nothing here is a sandbox.
The built-in functions run no code that is in a completion. Whoever has a function do so sees to the
sandbox.
"""

from megatron_grpo.rewards.pool import RewardError, RewardPool, ScoringGivenUp
from megatron_grpo.rewards.total import total_rewards

__all__ = ["RewardError", "RewardPool", "ScoringGivenUp", "total_rewards"]
