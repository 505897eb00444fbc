"""Samples: the completions that engines return and the trainer trains on."""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_grpo.data.rows import BASE64, Row
from megatron_grpo.unicode import as_unicode

if TYPE_CHECKING:
    from megatron_grpo.data.prompts import Prompt


class Branch(NamedTuple):
    """A sequence that is trained on: a part of a completion, and what the model read before it."""

    context: tuple[tuple[int, int], ...]
    """Bounds of parts of prompt and completion, joined, that end to end come before it."""
    start: int
    end: int
    """Its own part of the completion."""


class Heard(NamedTuple):
    """Messages that a turn of an agent's model answered, and tools that it called."""

    roles: tuple[str, ...]
    """Roles of the messages since the turn before it, such as `tool`; none of a text completion."""
    calls: tuple[str, ...]
    """Names of the tools that it called."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of one prompt: a single turn, or a dialogue with an environment or an agent.

    Values per token are kept in arrays: 9 bytes for each of perhaps 10^8 tokens; tuples take 76.
    """

    prompt: "Prompt"
    """Prompt with the environment's first observation, or the agent's first request."""
    sample_index: int
    """Number among the completions of this prompt, from 0."""
    completion_ids: Sequence[int]
    """int32. Sampled tokens, with a sampled end token; in a dialogue, observations in between."""
    logprobs: Sequence[float]
    """float32. Log-probability of each sampled token, after temperature; 0 for observations."""
    finish_reason: str
    """`stop` when an end token or stop string was sampled, `length` when the limit was reached.

    In a dialogue `stop` when the environment was done, `max_turns` when it was not after the last
    turn, `length` when a turn was cut off or no tokens were left, `failed` when it failed.
    """
    text: str
    """The completion without special tokens, except those around observations."""
    policy_version: int
    """Version of the weights that sampled the first token, as the engine reports it."""
    versions: tuple[tuple[int, int], ...] = ()
    """Version and number of tokens of each part of the completion, if a push fell into it."""
    loss_mask: Sequence[int] = ()
    """int8. 1 for each sampled token, and 0 for those of observations. Default: all 1."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers, columns] uint8, int16 or int32: for each token of prompt and completion but
    the last, its experts (`rollout.router_replay`), and then the positions that its indexers chose
    (`rollout.indexer_replay`); None without both, or if a dialogue failed before its first turn."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(index of the last token, reward) of each turn that the environment answered; with an agent
    of every turn, the reward at the last."""
    heard: tuple[Heard, ...] = ()
    """Messages and tools of an agent's turns, one entry for each of `step_rewards`."""
    branches: tuple[Branch, ...] = ()
    """Sequences of an agent that did not only append to its messages; their own parts do not
    overlap. Default: a single one, the completion after the prompt."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements of an agent, and its calls of tools."""

    def __post_init__(self) -> None:
        mask = self.loss_mask or b"\1" * len(self.completion_ids)
        object.__setattr__(self, "completion_ids", array("i", self.completion_ids))
        object.__setattr__(self, "logprobs", array("f", self.logprobs))
        object.__setattr__(self, "loss_mask", array("b", mask))
        assert len(self.loss_mask) == len(self.logprobs) == len(self.completion_ids)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return self.versions or ((self.policy_version, len(self.completion_ids)),)

    @property
    def sequences(self) -> tuple[Branch, ...]:
        """Sequences to train on: the `branches`, or the whole."""
        whole = Branch(((0, len(self.prompt.token_ids)),), 0, len(self.completion_ids))
        return self.branches or (whole,)

    @cached_property  # every optimizer step asks for it, and it takes seconds for long generations
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    @property
    def dialogue_reward(self) -> float:
        """The sum of the step rewards; NaN when the environment or the agent failed."""
        if self.finish_reason == "failed":
            return math.nan
        return math.fsum(reward for _, reward in self.step_rewards)


def extend_spans(spans: list[tuple[int, int]], version: int, num_tokens: int) -> None:
    """Add a part of a completion to its `Sample.spans`, or to the last one of that version."""
    if spans and spans[-1][0] == version:
        num_tokens += spans.pop()[1]
    if num_tokens:
        spans.append((version, num_tokens))


MOST_CHARACTERS = 2000
"""Longer values of a row, such as the tests of a program, are cut in the log of completions."""

Columns = dict[int, dict[str, Any]]
"""Columns of each row of the data but for the prompt, as values of JSON."""


def columns_by_prompt(samples: Iterable[Sample], prompt_column: str) -> Columns:
    """The columns of the samples' prompts, for logs: made once for each, as they may be large."""
    rows = {sample.prompt.index: sample.prompt.row for sample in samples}
    return {index: logged_columns(row, prompt_column) for index, row in rows.items()}


def logged_columns(row: Row, prompt_column: str) -> dict[str, Any]:
    """The columns of a row but the prompt as values of JSON: others become text or, if they are not
    finite, null; bytes and base64 are left out."""
    return {
        as_unicode(name): _logged(_without_contents(value))
        for name, value in row.items()
        if name != prompt_column
    }


def _without_contents(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_contents(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_contents(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str) and value.startswith(BASE64):
        return f"{len(value)} characters of base64"
    return value


def _logged(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = as_unicode(text)
    if len(text) > MOST_CHARACTERS:
        return f"{text[:MOST_CHARACTERS]}…"
    return text if isinstance(value, str) else json.loads(text, parse_constant=lambda _: None)


def first_seed(seed: int, series: int, position: int) -> int:
    """Seed of sample 0 of the prompt at `position` of generation `series`; sample i gets this + i.

    A pure function: samples do not depend on which engine serves which prompt. 62 bits of a hash:
    neighbouring arguments give unrelated seeds, and those of all samples stay within int64.
    """
    return _hash(seed, series, position)


def turn_seed(seed: int, series: int, position: int, sample_index: int, turn: int) -> int:
    """Seed of turn `turn` (0, 1, ...) of a sample, and of its environment (-1)."""
    return _hash(seed, series, position, sample_index, turn)


def seed_after(seed: int, num_tokens: int) -> int:
    """Seed of the tokens that follow `num_tokens` that were sampled with `seed`."""
    return _hash(seed, num_tokens)


def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
