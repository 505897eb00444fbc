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

from megatron_grpo.data.messages import shown_text
from megatron_grpo.data.rows import BASE64, Row
from megatron_grpo.unicode import as_unicode

if TYPE_CHECKING:
    from megatron_grpo.data.prompts import Prompt


class Branch(NamedTuple):
    """A training sequence: part of a completion, and the context that the model read before it."""

    context: tuple[tuple[int, int], ...]
    """(start, end) of the parts of prompt and completion that, end to end, are the context."""
    start: int
    end: int
    """End of the branch's own part of the completion, from `start`."""


class Heard(NamedTuple):
    """Messages that the model answered in a turn of a dialogue, and tools that it called."""

    roles: tuple[str, ...]
    """Roles of the messages since the previous turn, such as `tool`; `environment` for an
    observation; empty for text completions."""
    calls: tuple[str, ...]
    """Names of the called tools."""
    texts: tuple[str, ...] = ()
    """Texts of the messages, parallel to `roles`."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of one prompt: a single turn, or a dialogue with an environment or an agent.

    Values per token are arrays: 9 bytes for each of perhaps 10^8 tokens, where tuples take 76.
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
    """`stop` for a sampled end token or stop string, `length` for the token limit.

    In a dialogue, `stop` if the environment was done, `max_turns` if it was not done after the last
    turn, `length` if a turn was cut off or no tokens were left, `failed` if it failed.
    """
    text: str
    """Completion without special tokens, except the special tokens around observations."""
    policy_version: int
    """Version of the weights that sampled the first token, as the engine reports it."""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of each part of the completion, if a push happened during it."""
    temperature: float | None = None
    """Temperature of a retry (`grpo.dynamic_sample_temperature`); None: `rollout.temperature`."""
    loss_mask: Sequence[int] = ()
    """int8. 1 for sampled tokens, 0 for observations. Default: all 1."""
    # Not compared: `==` of arrays has no single truth value.
    routes: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers, columns] uint8, int16 or int32, for all tokens but the last: experts
    (`rollout.router_replay`), then positions that indexers chose (`rollout.indexer_replay`). None
    without both, or if a dialogue failed before its first turn."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(index of the last token, reward) of each turn that the environment answered. With an agent,
    of every turn, and the last one has the reward."""
    heard: tuple[Heard, ...] = ()
    """Messages and tools of the turns of a dialogue, parallel to `step_rewards`."""
    branches: tuple[Branch, ...] = ()
    """Training sequences of an agent that changed its messages; their own parts do not overlap.
    Default: a single sequence, the completion after the prompt."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements by an agent, and counts of its tool calls."""
    failure: str = ""
    """Why the environment or the agent failed, such as the end of a program's stderr."""

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
        """Sequences to train on: the `branches`, or prompt and completion."""
        whole = Branch(((0, len(self.prompt.token_ids)),), 0, len(self.completion_ids))
        return self.branches or (whole,)

    @cached_property  # every optimizer step asks for it, and it takes seconds for long generations
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    @property
    def dialogue_reward(self) -> float:
        """Sum of the step rewards; NaN if the environment or the agent failed."""
        if self.finish_reason == "failed":
            return math.nan
        return math.fsum(reward for _, reward in self.step_rewards)


def extend_spans(spans: list[tuple[int, int]], version: int, num_tokens: int) -> None:
    """Append a part of a completion to its `Sample.spans`; a part of the same version is merged."""
    if spans and spans[-1][0] == version:
        num_tokens += spans.pop()[1]
    if num_tokens:
        spans.append((version, num_tokens))


def sample_row(
    sample: Sample, scores: Mapping[str, float], total: float, columns: "Columns"
) -> dict[str, Any]:
    """Row of a scored sample for logs, without values of training. Failed scores are null."""
    # An environment or agent that changed the prompt has changed its text alone.
    prompt = sample.prompt
    chat = None if prompt.is_own else prompt.messages
    return {
        "prompt_index": prompt.index,
        "sample_index": sample.sample_index,
        "prompt": prompt.text,
        **({"messages": as_unicode(_texts_of(chat))} if isinstance(chat, list) else {}),
        "completion": sample.text,
        "num_tokens": sample.num_sampled,
        "reward": finite_or_none(total),
        "rewards": {name: finite_or_none(value) for name, value in scores.items()},
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        **({"versions": sample.versions} if sample.versions else {}),
        **({"temperature": sample.temperature} if sample.temperature else {}),
        **({"metrics": sample.metrics} if sample.metrics else {}),
        **({"failure": as_unicode(sample.failure)} if sample.failure else {}),
        "columns": columns[prompt.index],
    }


def _texts_of(chat: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Role and text of each message."""
    return [{"role": each["role"], "content": shown_text(each["content"])} for each in chat]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


MOST_CHARACTERS = 2000
"""Maximum characters of a row's value in the log of completions; longer ones are cut."""

Columns = dict[int, dict[str, Any]]
"""Columns of each row except the prompt, as JSON values, by the row's index."""


def columns_by_prompt(samples: Iterable[Sample], prompt_column: str) -> Columns:
    """Columns of the samples' prompts, for logs. Made once per prompt, as they may be large."""
    rows = {sample.prompt.index: sample.prompt.row for sample in samples}
    return {index: logged_columns(row, prompt_column) for index, row in rows.items()}


def logged_columns(row: Row, prompt_column: str) -> dict[str, Any]:
    """Convert the columns of a row, except the prompt, to JSON values. Other types become text,
    numbers that are not finite null; bytes and base64 are left out."""
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

    A pure function, so samples do not depend on the engine that serves a prompt.
    """
    return _hash(seed, series, position)


def turn_seed(seed: int, series: int, position: int, sample_index: int, turn: int) -> int:
    """Seed of turn `turn` (0, 1, ...) of a sample, and of its environment (-1)."""
    return _hash(seed, series, position, sample_index, turn)


def seed_after(seed: int, num_tokens: int) -> int:
    """Seed of the tokens that follow `num_tokens` tokens sampled with `seed`."""
    return _hash(seed, num_tokens)


def _hash(*numbers: int) -> int:
    # A hash, so that neighbouring arguments give unrelated seeds. It has 62 bits: engines take
    # int64, which must also hold `first_seed` plus the index of a sample.
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def made_up(prompt: "Prompt", index: int, text: str, finish_reason: str = "stop") -> Sample:
    """A completion of one token, to try out a user's function before a run."""
    return Sample(
        prompt=prompt,
        sample_index=index,
        completion_ids=prompt.token_ids[-1:],
        logprobs=[0.0],
        finish_reason=finish_reason,
        text=text,
        policy_version=0,
    )
