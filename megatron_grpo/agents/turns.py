"""Observations of environments as tokens between the turns of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_grpo.agents.fork_pool import InstanceFailed
from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.data.encoding import TEMPLATE_ERRORS, encode_rows, render_chats
from megatron_grpo.data.messages import text_of
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.rows import Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Contents of a probe dialogue: no template contains them, and they have no spaces at their ends
# that a template might strip.
ASKED, SAID = "qxjvzk0", "qxjvzk1"
# Contains characters that a template would escape if it wrote the content as JSON or HTML.
OBSERVED = 'qxjvzk2 "\\\n<é&> qxjvzk3'


@dataclass(frozen=True)
class ObservationTemplate:
    """Encodes observations between turns; sampled tokens are never encoded again.

    The text behind a turn is encoded on its own: the rest of the assistant's turn, the observation
    as a message, and the start of the next turn, all as the chat template writes them. A turn that
    ended with a token of `rollout.stop_token_ids` or a string of `rollout.stop` is closed with the
    template's end token. As in prompts, names of special tokens in an observation become these
    tokens.
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
    ) -> "ObservationTemplate":
        """Read the chat template with a probe dialogue; without a template, observations are bare.
        Raises ValueError if the template's dialogues cannot be continued token by token."""
        if not cfg.data.apply_chat_template:
            return cls(cfg.data, tokenizer, end_tokens)
        role = cfg.environment.observation_role
        whole = _render(cfg.data, tokenizer, role)
        before, after = _between(whole)
        turns = cls(cfg.data, tokenizer, end_tokens, before, after)
        end = turns._check(whole)
        # After a sampled stop token the template still has to close the turn, unless it is `end`.
        closing = [t for t in end_tokens if t == end or t not in cfg.rollout.stop_token_ids]
        return replace(turns, end_tokens=closing)

    def encode_observation(self, observation: str, last_token: int) -> tuple[tuple[int, ...], str]:
        """Tokens and text after a turn's `last_token`, up to the header of the next turn."""
        if not self.data.apply_chat_template:
            ids = self.tokenizer(observation, add_special_tokens=False)["input_ids"]
            return tuple(ids), observation
        text = f"{self.before}{observation}{self.after}"
        ids = self._encode(text)
        if last_token not in self.end_tokens:
            return tuple(ids), text
        # `before` begins with the end token, which the turn has already.
        return tuple(ids[1:]), text[len(self.tokenizer.decode(ids[:1])) :]

    def with_first_observation(self, prompt: Prompt, observation: str) -> Prompt:
        """The prompt with `observation` appended to its last message, behind all images. Raises
        InstanceFailed if they cannot be encoded together."""
        column, images = self.data.prompt_column, prompt.images
        row = {**prompt.row, column: _appended(prompt.row[column], observation)}
        [encoded] = encode_rows(self.data, self.tokenizer, [row], images.reader if images else None)
        if isinstance(encoded, Fault):  # such as a mark of an image in the observation
            raise InstanceFailed(f"with its first observation {encoded.kind}")
        return replace(prompt, token_ids=encoded.token_ids, text=encoded.text, is_own=True)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check(self, whole: str) -> int:
        """Return the template's end token of a turn. Raises ValueError unless the text behind the
        turn has equal tokens, encoded alone and as a part of the whole dialogue."""
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
    """Special tokens that the chat template writes after the last turn of a dialogue, where some
    templates end earlier turns differently; empty if it refuses the probe dialogue."""
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **data.template_variables)
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
    """Text between the model's turn and the observation, and text behind the observation."""
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
    return [*others, {**last, "content": text_of(last.get("content")) + observation}]
