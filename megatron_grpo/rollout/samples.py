"""Samples: what the engines return and the trainer learns from."""

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_grpo.data.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of one prompt: one turn of the model, or its dialogue with an environment."""

    prompt: "Prompt"
    """Of a dialogue, with what the environment said first."""
    sample_index: int
    """Number among the completions of this prompt, from 0."""
    completion_ids: tuple[int, ...]
    """Sampled tokens, the end token included when it was sampled; between turns, observations."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, after temperature; 0 of observations."""
    finish_reason: str
    """`stop` when an end token was sampled, `length` when the limit was reached before.

    Of a dialogue: `stop` when the environment was done, `max_turns` when it was not after so many,
    `length` when a turn was cut or no token was left for another, `failed` when the environment
    failed.
    """
    text: str
    """The completion without special tokens, but for those around observations."""
    policy_version: int
    """Which weights made every token, as the engine reports it."""
    loss_mask: tuple[bool, ...] = ()
    """Of each token whether it was sampled, and not observed. By default all were."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """Of each turn that the environment has answered: the index of its last token, the reward."""

    def __post_init__(self) -> None:
        if not self.loss_mask:
            object.__setattr__(self, "loss_mask", (True,) * len(self.completion_ids))
        assert len(self.loss_mask) == len(self.logprobs) == len(self.completion_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model is trained on."""
        return sum(self.loss_mask)

    @property
    def environment_reward(self) -> float:
        """The sum over the steps; NaN when the environment failed."""
        if self.finish_reason == "failed":
            return math.nan
        return math.fsum(reward for _, reward in self.step_rewards)


def first_seed(seed: int, step: int, position: int) -> int:
    """Seed of sample 0 of the prompt at `position` of generation `step`; sample i has this plus i.

    A pure function, so that samples depend neither on the number of engines nor on which engine
    serves which prompt. 62 bits of a hash: neighbours in any argument share nothing, and vLLM,
    which itself counts up from a request's seed, stays inside int64.
    """
    return _hash(seed, step, position)


def turn_seed(seed: int, step: int, position: int, sample_index: int, turn: int) -> int:
    """Seed of turn `turn` (0, 1, ...) of a sample, and of its environment (-1).

    As `first_seed`, a pure function; the moment at which a turn begins has no part in it.
    """
    return _hash(seed, step, position, sample_index, turn)


def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
