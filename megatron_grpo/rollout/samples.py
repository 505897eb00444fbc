"""Samples: what the engines return and the trainer learns from."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_grpo.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of one prompt."""

    prompt: "Prompt"
    sample_index: int
    """Number among the completions of this prompt, from 0."""
    completion_ids: tuple[int, ...]
    """Sampled tokens, the end token included when it was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, after temperature."""
    finish_reason: str
    """`stop` when an end token was sampled, `length` when the limit was reached before."""
    text: str
    """The completion without special tokens."""
    policy_version: int
    """Which weights made every token, as the engine reports it."""


def first_seed(seed: int, step: int, position: int) -> int:
    """Seed of sample 0 of the prompt at `position` of generation `step`; sample i has this plus i.

    A pure function, so that samples depend neither on the number of engines nor on which engine
    serves which prompt. 62 bits of a hash: neighbours in any argument share nothing, and vLLM,
    which itself counts up from a request's seed, stays inside int64.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
