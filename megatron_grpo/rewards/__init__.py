"""Rewards: completions in, one score per completion and function out.

A reward function is called once per prompt with all its completions, by keyword:

    def my_reward(completions: list[str], prompts: list[str], **columns: list) -> list[float]

`columns` are those of the data row, one value per completion, the reference answer under `answer`;
and of the completions `completion_ids` (lists of token ids, the end token included) and
`finish_reasons` (`stop`, or `length` where the limit cut it; with an environment also `max_turns`
and `failed`). A function may name only the parameters that it uses. One that names
`reward_timeout` gets the seconds that it has.

It returns a list (or an array) of one number per completion. A score that is None, NaN, infinite or
an exception has failed, and so have all scores of a call that raises, ends late, takes too much
memory or kills its process, which is then replaced. What has failed is NaN to the trainer and never
a zero: those completions are masked, and more of them than `reward.max_failed_fraction` of a
generation, or of an evaluation, stop the run. So do at once, since nothing of it can be masked, a
list of another length, what is no list, and a score that is no number. (None does not mean, as to
TRL, that a function does not apply to a completion: it says so with a 0 of its own.)

An `async def` is awaited: up to `reward.max_concurrent_calls` calls run side by side, in the event
loop of one process. One that is late is cancelled. Whatever blocks that loop blocks them all.

A function runs in a process of its own, with the rights of the user who trains: nothing here is a
sandbox. The built-in functions run no code that is in a completion. Whoever has a function do so
sees to the sandbox.
"""

from megatron_grpo.rewards.pool import RewardPool, ScoringGivenUp
from megatron_grpo.rewards.scoring import RewardError, check_failed
from megatron_grpo.rewards.total import total_rewards

__all__ = ["RewardError", "RewardPool", "ScoringGivenUp", "check_failed", "total_rewards"]
