"""Messages to tokens: sampled tokens of earlier turns are kept, never encoded again.

The chat template renders all messages of a request as text. If the messages repeat an earlier
request and the model's answer to it, and the template renders them as it did then, the session's
own tokens stand for this part and only the rest is encoded. Any other text is a rewritten history.
Some templates rewrite, too: Qwen3's drops the thinking of earlier turns when the user speaks.
"""

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_grpo.agents.token_tree import Place
from megatron_grpo.agents.turns import end_of_turn
from megatron_grpo.config.config import Config
from megatron_grpo.data.encoding import TEMPLATE_ERRORS
from megatron_grpo.data.images import ImageReader, PromptSources
from megatron_grpo.data.messages import arguments_of, json_value, text_of
from megatron_grpo.unicode import as_unicode
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Arguments = dict[str, Any] | str
"""Arguments of a call: an object, or the model's text if that is no JSON object."""
FIRST_MARK, MARKS = 0xD800, re.compile("[\ud800-\udfff]")
"""Image i of the row in a rendered text is the character FIRST_MARK + i: half of a surrogate pair,
which no text of a request has. So texts with different images differ."""
NO_CALL = "each of tool_calls must have a function with a name, and arguments in JSON"


class BadRequest(ValueError):
    """A request that the endpoint refuses, with the reason for the agent's author. `code` is one of
    `config.agent.LIMITS` if a limit of the session is reached."""

    def __init__(self, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.code = code


class Start(NamedTuple):
    """Length and digest of a prompt text: a long session would hold many whole texts."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "Start":
        """The start of all texts that begin with `text`."""
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


@dataclass(frozen=True)
class Turn:
    """A turn of the model, with its request."""

    history: tuple[bytes, ...]
    """Digests of the request's messages and its tools; see `digests`."""
    answer: Message
    prompt_text: Start
    """The rendered request, or the prompt of a text completion."""
    text: str
    """Sampled text without special tokens."""
    prompt: Place
    end: Place
    """Ends of the prompt and of the turn in the session's tree."""
    last_token: int
    heard: Sequence[Message] = ()
    """Messages of the request after its last answer."""


@dataclass(frozen=True)
class Found:
    """Match of a request in the session's tree: a place, and the text behind it."""

    place: Place | None
    """None if the request repeats no turn."""
    rest: str


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of the model, and its tokenizer."""

    tokenizer: "PreTrainedTokenizerBase"
    variables: Mapping[str, Any]
    end: str
    """Text of the template's end-of-turn token; empty if it writes none."""
    ends: frozenset[int]
    """The template's end-of-turn token, and end tokens that are no `rollout.stop_token_ids`."""
    end_tokens: frozenset[int]
    """All tokens at which engines stop; a turn's text does not contain them."""
    image_token: str = ""
    """The template's text of an image; empty in a run without images."""

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", cfg: Config, end_tokens: Sequence[int]
    ) -> "ChatTemplate":
        written = [token for token in end_of_turn(cfg.data, tokenizer) if token in end_tokens][:1]
        others = [token for token in end_tokens if token not in cfg.rollout.stop_token_ids]
        reader = ImageReader.of(cfg)
        return cls(
            tokenizer,
            cfg.data.template_variables,
            tokenizer.decode(written),
            frozenset([*written, *others]),
            frozenset(end_tokens),
            str(tokenizer.convert_ids_to_tokens(reader.token_id)) if reader else "",
        )

    def render(self, messages: Sequence[Message], tools: Any, *, is_prompt: bool) -> str:
        """Messages as text, with MARKS for images; a prompt ends where the model's turn begins.

        Templates that iterate over the arguments of a call need objects, others (DeepSeek's) need
        text: the first form that does not fail is used for all calls.
        """
        if self.tokenizer.chat_template is None:
            raise BadRequest("the model's tokenizer has no chat template: use /v1/completions")
        refusal, tried = "", list[list[Message]]()
        for form in (_as_written, as_object, as_text):
            if (chat := as_openai(messages, form)) in tried:
                continue
            tried.append(chat)
            try:
                text = self.tokenizer.apply_chat_template(
                    chat,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=is_prompt,
                    **self.variables,
                )
            except TEMPLATE_ERRORS as error:
                refusal = refusal or f"the chat template refuses these messages: {error}"
            else:
                assert isinstance(text, str)
                return self._marked(text, messages)
        raise BadRequest(refusal)

    def _marked(self, text: str, messages: Sequence[Message]) -> str:
        """Replace the text of each image by its mark."""
        contents = [each["content"] for each in messages if isinstance(each["content"], list)]
        images = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
        first, *others = text.split(self.image_token) if self.image_token else [text]
        if len(others) != len(images):
            raise BadRequest(
                f"the chat template writes {self.image_token} {counted(len(others), 'time')} for "
                f"{counted(len(images), 'image')}: messages must not contain it"
            )
        marks = [chr(FIRST_MARK + image) for image in images]
        return first + "".join(map(add, marks, others))

    def unmarked(self, text: str) -> str:
        return MARKS.sub(self.image_token, text)

    def encode(self, text: str, images: PromptSources | None = None) -> list[int]:
        """Tokens of a rendered text, which has its special tokens already; marks become the row's
        `images`, see `PromptSources.expand`."""
        ids: list[int] = self.tokenizer(self.unmarked(text), add_special_tokens=False)["input_ids"]
        numbers = [ord(mark) - FIRST_MARK for mark in MARKS.findall(text)]
        return images.expand(ids, numbers) if images and numbers else ids

    def find(
        self, turns: Sequence[Turn], messages: Sequence[Message], tools: Any, text: str
    ) -> Found:
        """Match `messages`, rendered as `text`, against the session's turns; the longest match
        wins."""
        found, own = _longest_prompt(turns, text), digests(messages, tools)
        of_chats = [turn for turn in turns if turn.history]
        for turn in sorted(of_chats, key=lambda turn: len(turn.history), reverse=True):
            size = len(turn.history)
            if own[:size] == turn.history and len(messages) >= size:
                # `history` has a digest of the tools and of size - 1 messages: next is the answer.
                echo = messages[size - 1]
                if _is_echo(echo, turn.answer):
                    rest = self._after(turn, messages[:size], tools, text)
                    if rest is not None:
                        return _longer(found, Found(turn.end, rest))
        return found

    def find_text(self, turns: Sequence[Turn], text: str) -> Found:
        """Match a text prompt against the session's turns; the longest match wins."""
        found = _longest_prompt(turns, text)
        for turn in turns:
            length, end = turn.prompt_text.length, turn.end
            if turn.prompt_text.begins(text) and text.startswith(turn.text, length):
                if turn.last_token in self.end_tokens:  # `turn.text` does not contain it
                    end = Place(end.branch, end.length - 1)
                found = _longer(found, Found(end, text[length + len(turn.text) :]))
        return found

    def _after(self, turn: Turn, history: Sequence[Message], tools: Any, text: str) -> str | None:
        """Remainder of `text` after the turn's last token; None if its history was rewritten."""
        rendered = self.render(history, tools, is_prompt=False)
        # The second condition fails for templates that now render earlier turns differently.
        if not (text.startswith(rendered) and turn.prompt_text.begins(rendered)):
            return None
        answer = rendered[turn.prompt_text.length :]
        place = answer.rfind(self.end) if self.end else -1
        text_end = len(answer) if place < 0 else place
        # The template renders parsed calls in its own form, so the text cannot equal the model's.
        # Other texts are compared without whitespace, which templates may strip.
        is_parsed = "tool_calls" in turn.answer
        if not is_parsed and _squashed(answer[:text_end]) != _squashed(turn.text):
            return None
        if place >= 0 and turn.last_token in self.ends:
            text_end += len(self.end)
        return answer[text_end:] + text[len(rendered) :]


def since_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages after the model's last one."""
    return [*takewhile(lambda each: each["role"] != "assistant", reversed(messages))][::-1]


def digests(messages: Sequence[Message], tools: Any) -> tuple[bytes, ...]:
    """Digests of the tools and of each message in the form of `messages_of`: 1 + len(messages)."""
    return tuple(_digest(json.dumps(each, sort_keys=True)) for each in (tools, *messages))


def image_digest(url: Any) -> bytes:
    """Digest of the base64 behind `data:image/png;base64,`: clients may write another type."""
    return _digest(str(url).rpartition(",")[2])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _longest_prompt(turns: Sequence[Turn], text: str) -> Found:
    """Match a text against the prompts of turns; the longest wins."""
    found = Found(None, text)
    for turn in turns:
        if turn.prompt_text.begins(text):
            found = _longer(found, Found(turn.prompt, text[turn.prompt_text.length :]))
    return found


def messages_of(given: Any, images: Mapping[bytes, int]) -> list[Message]:
    """Normalise messages: contents become text, arguments of calls objects, or text if they are no
    JSON object. A content with images is a list of parts, in which each is a number of `images`,
    the row's by `image_digest`. Raises BadRequest for other messages, and for other images."""
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list with at least one message")
    return [_message(each, images) for each in given]


def _message(given: Any, images: Mapping[bytes, int]) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise BadRequest("each message must be an object with a role")
    message: Message = {"role": given["role"], "content": _content(given.get("content"), images)}
    if message["role"] == "assistant" and not isinstance(message["content"], str):
        raise BadRequest("a message of the assistant has an image, which models cannot write")
    reasoning = given.get("reasoning") or given.get("reasoning_content")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequest(NO_CALL)
        message["tool_calls"] = [_call(call) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _content(given: Any, images: Mapping[bytes, int]) -> Any:
    try:
        if not isinstance(given, list) or not any(map(_is_image, given)):
            return text_of(given)
        return [
            {"type": "image", "image": _number(part, images)}
            if _is_image(part)
            else {"type": "text", "text": text_of([part])}
            for part in given
        ]
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _number(part: Mapping[str, Any], images: Mapping[bytes, int]) -> int:
    url = part.get("image_url")
    number = images.get(image_digest(url.get("url") if isinstance(url, dict) else url))
    if number is None:
        raise ValueError(
            f"an image of a message is none of the row's {len(images)}: send those in the column "
            "of images as they are; images that tools make are not supported"
        )
    return number


def _call(given: Any) -> dict[str, Any]:
    try:
        name, arguments = given["function"]["name"], given["function"]["arguments"]
    except (TypeError, KeyError):
        raise BadRequest(NO_CALL) from None
    if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
        raise BadRequest(NO_CALL)
    if isinstance(arguments, str):
        arguments = as_unicode(arguments_of(arguments))
    return {"id": given.get("id"), "name": name, "arguments": arguments or {}}


def _as_written(arguments: Arguments) -> Arguments:
    return arguments


def as_object(arguments: Arguments) -> dict[str, Any]:
    """Arguments as an object; other text becomes its field `arguments`, parsed if it is JSON.

    >>> as_object("[1, 2]"), as_object("{'a': 1}")
    ({'arguments': [1, 2]}, {'arguments': "{'a': 1}"})
    """
    if isinstance(arguments, dict):
        return arguments
    return as_unicode({"arguments": json_value(arguments)})


def as_text(arguments: Arguments) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def as_openai(
    messages: Sequence[Message], form: Callable[[Arguments], Arguments] = as_text
) -> list[Message]:
    """Messages of `messages_of` in OpenAI's form; `form` is applied to the arguments of calls."""
    return [
        {
            **message,
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": form(call["arguments"])},
                }
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def check_calls(messages: Sequence[Message], turns: Sequence[Turn]) -> None:
    """Raise BadRequest for a call with arguments that are no object, unless one of `turns` made it:
    the model may write broken JSON, and the agent has to send such a call back unchanged."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    broken = [call for call in calls if isinstance(call["arguments"], str)]
    for call in broken:
        if not any(_called(call) in _calls(turn.answer) for turn in turns):
            raise BadRequest(
                f"arguments of a call of {call['name']} must be an object in JSON, not "
                f"{reprlib.repr(call['arguments'])}, which the model has not written"
            )


def _is_echo(message: Message, answer: Message) -> bool:
    """Whether a message repeats the model's `answer`, up to surrounding whitespace."""
    return (
        message["role"] == "assistant"
        and _calls(message) == _calls(answer)  # without ids: agents may change them
        and all(
            message.get(name, "").strip() == answer.get(name, "").strip()
            for name in ("content", "reasoning_content")
        )
    )


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [_called(call) for call in message.get("tool_calls", ())]


def _called(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["name"], as_object(call["arguments"])


def _squashed(text: str) -> str:
    return "".join(text.split())


def _longer(one: Found, other: Found) -> Found:
    # `other` wins a tie: a turn without text ends where its prompt does, and `other` is its end.
    return other if one.place is None or len(other.rest) <= len(one.rest) else one
