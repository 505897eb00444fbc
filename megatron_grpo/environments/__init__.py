"""Environments: the model's partner in a dialogue, turn by turn.

An environment is a class in a user's file:

    class Guessing:
        def reset(self, prompt: str, **columns) -> str | None:
            ...  # `columns` are those of the data row; a returned text is appended to the prompt
        def step(self, text: str) -> tuple[str, float, bool]:
            ...  # the model's turn -> observation, reward, done

`step` may also take `token_ids` and `finish_reason` of the turn (`stop`, or `length` if it was cut
off), and `tokens_left`, the number of tokens that observations and further turns may have together.

A classmethod `load(**arguments)`, if there is one, is called once, before any instance is made.

Every sample has its own instance, made from `environment.arguments`, in its own process: the file
is loaded once, and each instance lives in a fork of the process that loaded it. So a call that
hangs, dies or uses too much memory can be killed without affecting other samples, and a step that
waits for something blocks no other. Nothing here is a sandbox.

A sample whose environment fails, or is late, has failed: its reward is NaN, never zero.

The same elsewhere: TRL's `environment_factory` (`reset` with the columns, whose text is appended
to the last user message), verl's agent loop with an interaction, ms-swift's `multi_turn_scheduler`
with a gym environment.
"""

from megatron_grpo.environments.pool import (
    EnvironmentFailed,
    EnvironmentPool,
    EnvironmentsLost,
    Instance,
    Step,
)

__all__ = ["EnvironmentFailed", "EnvironmentPool", "EnvironmentsLost", "Instance", "Step"]
