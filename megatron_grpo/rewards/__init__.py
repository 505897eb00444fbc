"""Rewards: from completions to one score per completion and reward function.

A reward function is called once per prompt with all its completions, by keyword:

    def my_reward(completions: list[str], prompts: list[str], **columns: list) -> list[float]

`columns` are the columns of the data row, one value per completion, with the reference answer as
`answer`; also `completion_ids` (lists of token ids, including the end token) and `finish_reasons`
(`stop`, or `length` if cut off by the limit; with an environment also `max_turns` and `failed`). A
function may name only the parameters that it uses: others are not sent (`**_` counts as none). If
it names `reward_timeout`, it gets its time limit in seconds.

It returns a list (or an array) with one number per completion. A score that is None, NaN, infinite
or an exception has failed; all scores of a call fail if it raises, times out, uses too much memory
or kills its process, which is then replaced. The trainer sees a failed score as NaN, never as zero:
such completions are masked, and the run stops when they are more than `reward.max_failed_fraction`
of a generation or evaluation. It stops at once for results that cannot be masked: not a list, a
list of another length, or a score that is not a number. (None does not mean "does not apply" as in
TRL: return 0 then.)

An `async def` is awaited: up to `reward.max_concurrent_calls` calls run concurrently in the event
loop of one process. A late call is cancelled. A call that blocks the loop blocks all of them.

Functions run in separate processes, with the rights of the user who trains: this is no sandbox. Of
the built-in functions only `unit_tests` runs code from completions, under bubblewrap. A function
that does so must provide the sandbox itself (`workers.sandbox`).

Nothing is imported here: it would slow the start of every process of reward functions.
"""
