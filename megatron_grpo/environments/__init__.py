"""Environments: what the model speaks with, turn by turn.

An environment is a class in a file of the user's:

    class Guessing:
        def reset(self, prompt: str, **columns) -> str | None:
            ...  # `columns` are those of the data row; a text is appended to the prompt
        def step(self, text: str) -> tuple[str, float, bool]:
            ...  # what the model said -> observation, reward, done

Every sample has an instance of its own, made from `environment.arguments`, and that a process of
its own: the file is loaded once, and each instance lives in a fork of the process that did. So a
call that hangs, dies or eats memory can be ended without touching the other samples, and a step
that waits for something keeps nobody else waiting. Nothing here is a sandbox.

A sample whose environment fails, or is late, has failed: its reward is NaN, and never a zero.

What others call it: TRL's `environment_factory` (`reset` with the columns, whose text is appended
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
