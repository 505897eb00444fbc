"""Multi-turn generation: each sample interacts with its environment at its own pace.

Observations become tokens between the model's turns, and those do not enter the loss.
"""

import asyncio
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.data.encoding import TEMPLATE_ERRORS, Encoded, encode_rows, render_chats
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, turn_seed
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.environments import EnvironmentFailed, EnvironmentPool, Instance, Step
from megatron_grpo.workers.tasks import gather_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Contents of the messages of a probe dialogue: they occur in no template, and have no spaces at
# their ends that a template might strip.
ASKED, SAID = "qxjvzk0", "qxjvzk1"
# With characters that a template would escape if it wrote the content as JSON or HTML.
OBSERVED = 'qxjvzk2 "\\\n<é&> qxjvzk3'


@dataclass(frozen=True)
class Turns:
    """How an observation is encoded, so that sampled tokens are never encoded again.

    A turn ends with the end token that was sampled. One that ended with a token of
    `rollout.stop_token_ids` or a string of `rollout.stop` is then closed with the template's.
    What follows is encoded on its own: the rest of the assistant's turn, the observation as a
    message, and the start of the next turn, all as the chat template writes them. As in prompts,
    names of special tokens in an observation become these tokens.
    """

    data: DataConfig
    tokenizer: "PreTrainedTokenizerBase"
    end_tokens: Sequence[int] = ()
    before: str = ""
    """Template text from the end token of the model's turn to the observation."""
    after: str = ""
    """Template text from the observation to the model's next turn."""

    @classmethod
    def from_config(
        cls, cfg: Config, tokenizer: "PreTrainedTokenizerBase", end_tokens: Sequence[int]
    ) -> "Turns":
        """The turns of the chat template, or bare observations if none is applied.

        Raises ValueError for a template with which a dialogue cannot be continued token by token.
        """
        if not cfg.data.apply_chat_template:
            return cls(cfg.data, tokenizer, end_tokens)
        role = cfg.environment.observation_role
        whole = _render(cfg.data, tokenizer, role)
        before, after = _between(whole)
        turns = cls(cfg.data, tokenizer, end_tokens, before, after)
        end = turns._check(whole)
        closing = [t for t in end_tokens if t == end or t not in cfg.rollout.stop_token_ids]
        return replace(turns, end_tokens=closing)

    def encode_observation(self, observation: str, last_token: int) -> tuple[tuple[int, ...], str]:
        """Tokens and text from after `last_token` of a turn to the start of the next turn."""
        if not self.data.apply_chat_template:
            ids = self.tokenizer(observation, add_special_tokens=False)["input_ids"]
            return tuple(ids), observation
        text = f"{self.before}{observation}{self.after}"
        ids = self._encode(text)
        if last_token not in self.end_tokens:
            return tuple(ids), text
        return tuple(ids[1:]), self._without_end(text)

    def with_first_observation(self, prompt: Prompt, observation: str) -> Prompt:
        """The prompt with `observation` appended to its last message."""
        column = self.data.prompt_column
        row = {**prompt.row, column: _appended(prompt.row[column], observation)}
        [encoded] = encode_rows(self.data, self.tokenizer, [row])
        assert isinstance(encoded, Encoded), "it was none without the observation"
        return replace(
            prompt, token_ids=encoded.token_ids, text=encoded.text, first_observation=observation
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _without_end(self, text: str) -> str:
        return text[len(self.tokenizer.decode(self._encode(text)[:1])) :]

    def _check(self, whole: str) -> int:
        """The template's end token of a turn.

        Raises ValueError unless the separately encoded pieces equal the end of the whole.
        """
        pieces = self._encode(f"{self.before}{OBSERVED}{self.after}")
        end = pieces[0] if pieces else None
        if end is None or end not in self.end_tokens:
            raise ValueError(
                "the chat template does not close the model's turn with a token that ends it: "
                f"{self.before!r} begins with token {end}, and a completion ends with "
                f"{', '.join(map(str, self.end_tokens))}: add it to rollout.stop_token_ids, or use "
                "data.apply_chat_template=false"
            )
        if self._encode(whole)[-len(pieces) :] != pieces:
            raise ValueError(
                "the chat template cannot be continued token by token: in the dialogue\n"
                f"{whole!r}\nthe part after the model's turn has other tokens than when encoded "
                f"alone, {pieces}: use data.apply_chat_template=false"
            )
        return end


def end_of_turn(data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The special tokens that the chat template writes after the model's turn.

    After the last turn of a dialogue: some templates end earlier ones in another way. None if the
    template refuses a dialogue, which only prompts of another form show.
    """
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **data.chat_template_kwargs)
    except TEMPLATE_ERRORS:
        return []
    _, _, rest = text.partition(SAID)
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return [token for token in ids if token in added and added[token].special]


def _render(data: DataConfig, tokenizer: "PreTrainedTokenizerBase", role: str) -> str:
    messages: list[Any] = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": SAID},
        {"role": role, "content": OBSERVED},
    ]
    try:
        text: str = render_chats(data, tokenizer, messages)
    except TEMPLATE_ERRORS as error:
        raise ValueError(
            f"the chat template refuses an observation of environment.observation_role {role!r} "
            f"after the model's turn: {error}"
        ) from None
    return text


def _between(whole: str) -> tuple[str, str]:
    """The text between the model's turn and the observation, and the text after that."""
    if any(whole.count(text) != 1 for text in (ASKED, SAID, OBSERVED)):
        raise ValueError(
            "the chat template does not show each message of a dialogue once:\n"
            f"{whole!r}\nuse another template, or data.apply_chat_template=false"
        )
    _, _, rest = whole.partition(SAID)
    before, _, after = rest.partition(OBSERVED)
    return before, after


def _appended(prompt: Any, observation: str) -> Any:
    if isinstance(prompt, str):
        return prompt + observation
    *others, last = prompt
    return [*others, {**last, "content": last["content"] + observation}]


@dataclass
class Dialogue:
    """One sample in progress: turns of the model with observations between them."""

    prompt: Prompt
    sample_index: int
    instance: Instance
    pending: Future[Any] | None
    """The environment's answer, while it is outstanding or not yet processed."""
    room: int
    """Number of tokens that may still be appended, sampled or observed."""
    # Arrays as in a `Sample`:
    completion_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    loss_mask: "array[int]" = field(default_factory=lambda: array("b"))
    text: str = ""
    routed_experts: list[np.ndarray] = field(default_factory=list)
    """Of each turn, the experts of the tokens that were new to the engine."""
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    """Empty until the dialogue ends."""
    failure: str = ""
    """Why the environment failed; empty if it did not."""
    _is_cut: bool = False
    """Whether the last turn has no end token."""

    def add_turn(self, choice: Choice) -> None:
        """Append a turn of the model and submit it to the environment."""
        self._append(choice.token_ids, choice.token_logprobs, True)
        self.text += choice.text
        self._is_cut = choice.finish_reason == "length"
        self.pending = self.instance.step(
            choice.text,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            tokens_left=self.room,
        )

    def add_first_observation(self, observation: str | None, turns: Turns) -> None:
        """Begin, with the first observation (if any) appended to the prompt."""
        if observation is None:
            return
        longer = turns.with_first_observation(self.prompt, observation)
        room = self.room - (len(longer.token_ids) - len(self.prompt.token_ids))
        if room < 1:
            raise EnvironmentFailed(
                f"its first observation is {1 - room} tokens too long for "
                "rollout.max_completion_length, which includes observations: raise it"
            )
        self.prompt, self.room = longer, room

    def add_step(self, step: Step, turns: Turns, max_turns: int) -> None:
        """Append the observation of an environment step, or end the dialogue."""
        self.step_rewards.append((len(self.completion_ids) - 1, step.reward))
        if self._is_cut:
            self.finish_reason = "length"
        elif step.done:
            self.finish_reason = "stop"
        elif len(self.step_rewards) == max_turns:
            self.finish_reason = "max_turns"
        else:
            tokens, text = turns.encode_observation(step.observation, self.completion_ids[-1])
            if len(tokens) >= self.room:
                self.finish_reason = "length"
            else:
                self._append(tokens, [0.0] * len(tokens), False)
                self.text += text

    def fail(self, failure: str) -> None:
        """End the dialogue without a reward; `failure` says why."""
        self.finish_reason, self.failure = "failed", failure

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], is_sampled: bool) -> None:
        self.completion_ids.extend(tokens)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([is_sampled] * len(tokens))
        self.room -= len(tokens)


class DialogueGeneration:
    """Dialogues for each prompt, by `params`; otherwise like a `Generation`.

    Each turn is a separate request with all tokens so far; the engine has their prefix cached. If
    an engine is lost, its dialogues continue on another one with the same request, and environment
    steps already taken are not repeated. Seeds do not depend on timing, but vLLM batches turns as
    they arrive, so sums round differently from run to run and some tokens may differ.
    """

    are_movable = False  # the engine that answered the last turn has the dialogue cached

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        environments: EnvironmentPool,
        turns: Turns,
        max_turns: int,
    ) -> None:
        self.policy_version = params.policy_version
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self._params, self._turns, self._max_turns = params, turns, max_turns
        self.dialogues: list[Dialogue] = []
        for prompt in prompts:
            for index in range(params.num_generations):
                instance = environments.new_instance()
                own_seed = self._turn_seed(len(self.dialogues), turn=-1)
                first = instance.reset(prompt.text, prompt.row, own_seed)
                dialogue = Dialogue(prompt, index, instance, first, params.max_completion_length)
                self.dialogues.append(dialogue)

    @property
    def open(self) -> dict[int, Json]:
        """The next request of every dialogue that has not ended, by dialogue number.

        Await `wait_for_environments` first, so that no dialogue waits for its environment.
        """
        return {
            number: self._request(number, dialogue)
            for number, dialogue in enumerate(self.dialogues)
            if not dialogue.finish_reason
        }

    @property
    def failures(self) -> list[str]:
        """One line per dialogue whose environment failed, with prompt, sample and turn."""
        return [
            f"prompt {dialogue.prompt.index}, sample {dialogue.sample_index}, turn "
            f"{len(dialogue.step_rewards) + 1}: {dialogue.failure}"
            for dialogue in self.dialogues
            if dialogue.failure
        ]

    def print_failures(self) -> None:
        """Print the number of dialogues whose environment failed, and the first failure, if any."""
        if failures := self.failures:
            line = f"the environment failed in {len(failures)} samples, the first of them: "
            print(line + failures[0], file=sys.stderr)

    async def wait_for_environments(self) -> None:
        """Wait for all outstanding answers of environments."""
        await gather_all(map(self._settle, self.dialogues))

    async def take_answer(self, number: int, choice: Choice, url: str) -> Json | None:
        """Process a turn from the engine at `url`; returns the next request, None at the end."""
        dialogue = self.dialogues[number]
        # An engine of a training run returns them to evaluations, too.
        if self._params.router_replay:
            dialogue.routed_experts.append(choice.routes)
        dialogue.add_turn(choice)
        self.engines.add(url)
        await self._settle(dialogue)
        return None if dialogue.finish_reason else self._request(number, dialogue)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once every dialogue has ended."""
        assert all(dialogue.finish_reason for dialogue in self.dialogues)
        return [
            Sample(
                prompt=dialogue.prompt,
                sample_index=dialogue.sample_index,
                completion_ids=dialogue.completion_ids,
                logprobs=dialogue.logprobs,
                finish_reason=dialogue.finish_reason,
                text=dialogue.text,
                policy_version=self.policy_version,
                loss_mask=dialogue.loss_mask,
                routed_experts=self._routes(dialogue),
                step_rewards=tuple(dialogue.step_rewards),
            )
            for dialogue in self.dialogues
        ]

    def abandon(self) -> None:
        """End the environments of all dialogues that have not ended, even in mid-step."""
        for dialogue in self.dialogues:
            if not dialogue.finish_reason:
                dialogue.instance.end()

    async def _settle(self, dialogue: Dialogue) -> None:
        """Wait for the answer of the dialogue's environment and process it.

        If this is cancelled while it waits, the answer stays pending for a later call.
        """
        if dialogue.pending is None:
            return
        try:
            answer = await asyncio.wrap_future(dialogue.pending)
            if dialogue.completion_ids:
                dialogue.add_step(Step(*answer), self._turns, self._max_turns)
            else:
                dialogue.add_first_observation(answer, self._turns)
        except EnvironmentFailed as failure:
            dialogue.fail(str(failure))
        dialogue.pending = None
        if dialogue.finish_reason:
            dialogue.instance.end()

    def _routes(self, dialogue: Dialogue) -> np.ndarray | None:
        return np.concatenate(dialogue.routed_experts) if dialogue.routed_experts else None

    def _request(self, number: int, dialogue: Dialogue) -> Json:
        return self._params.request(
            [*dialogue.prompt.token_ids, *dialogue.completion_ids],
            number=number,
            seed=self._turn_seed(number, turn=len(dialogue.step_rewards)),
            max_tokens=dialogue.room,
            # Those of earlier turns are kept: an engine that takes over may choose others.
            routes_start=sum(map(len, dialogue.routed_experts)),
        )

    def _turn_seed(self, number: int, turn: int) -> int:
        params = self._params
        position, sample_index = divmod(number, params.num_generations)
        position += params.first_position
        return turn_seed(params.seed, params.series, position, sample_index, turn)
