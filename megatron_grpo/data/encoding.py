"""Turn a row of the data into the text and tokens that an engine receives."""

import re
import reprlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_grpo.config.data import DataConfig
from megatron_grpo.data.images import ImageReader, PromptSources, images_of
from megatron_grpo.data.messages import IMAGE_MARK, message_of_data
from megatron_grpo.data.rows import Fault, Row
from megatron_grpo.unicode import is_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TemplateError, TypeError)
"""Errors of Jinja, and of a template that gets a field of an unexpected type."""
TEXTS_AT_ONCE = 4096
"""Enough for all cores; more would hold more of the tokenizer's lists in memory at a time."""
Chat = str | list[dict[str, Any]]
"""A text that is used as it is, or messages for the chat template."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as text, with the chat template applied, and as tokens."""

    text: str
    token_ids: "array[int]"
    """int32. An array, as a list takes nine times the memory, and data may have 10^8 tokens."""
    images: PromptSources | None = None


def encode_rows(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    reader: ImageReader | None = None,
) -> list[Encoded | Fault]:
    """Encode each row's prompt, or say why it has none. Raises ValueError if no row has tokens, and
    for a chat template that is missing or ignores a variable of the config."""
    chats = [chat_of(data, row) for row in rows]
    if not data.apply_chat_template:
        return _encode(data, tokenizer, chats)
    if tokenizer.chat_template is None:
        raise ValueError(
            "the model's tokenizer has no chat template: set data.apply_chat_template=false to "
            "send prompts as they are"
        )
    _check_variables(data, tokenizer)
    texts = _map_valid(chats, lambda messages: _render(data, tokenizer, messages))
    encoded = _encode(data, tokenizer, texts)
    if reader is None:
        return encoded
    return [
        _with_images(data, row, of_row, reader) for row, of_row in zip(rows, encoded, strict=True)
    ]


def _encode(
    data: DataConfig, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Any | Fault]
) -> list[Encoded | Fault]:
    """Tokenize texts; a text with half of a surrogate pair, from any field, becomes a fault."""
    invalid = Fault(f"{data.prompt_column!r} is not valid Unicode")
    found = [text if isinstance(text, Fault) or is_unicode(text) else invalid for text in texts]
    return _map_valid(found, lambda valid: _tokenize(data, tokenizer, valid))


def _with_images(
    data: DataConfig, row: Row, encoded: Encoded | Fault, reader: ImageReader
) -> Encoded | Fault:
    if isinstance(encoded, Fault):
        return encoded
    if isinstance(images := images_of(data, row), Fault):
        return images
    found = reader.expand(encoded.token_ids, images)
    if isinstance(found, Fault):
        return found
    token_ids, sources = found
    return Encoded(encoded.text, array("i", token_ids), sources)


def _check_variables(data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    for name in data.chat_template_kwargs:
        # Jinja is silent about a variable that no template reads.
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(
                f"data.chat_template_kwargs.{name} does nothing: the chat template of the model "
                "does not mention it; correct the name, or leave it out"
            )


def _map_valid[T, U](
    items: Sequence[T | Fault], function: Callable[[list[T]], Sequence[U | Fault]]
) -> list[U | Fault]:
    """Apply `function` to all valid items at once; faults stay in place."""
    valid = [item for item in items if not isinstance(item, Fault)]
    results = iter(function(valid) if valid else [])
    return [item if isinstance(item, Fault) else next(results) for item in items]


def chat_of(data: DataConfig, row: Row) -> Chat | Fault:
    """Build the messages of a row, or its text without a chat template."""
    for column in (data.prompt_column, data.answer_column):
        if column is not None and (fault := _check_column(column, row)):
            return fault
    prompt = row[data.prompt_column]
    messages = _messages(data.prompt_column, prompt)
    if isinstance(messages, Fault):
        return messages
    if not any(message["content"].strip() for message in messages):
        return Fault(f"{data.prompt_column!r} is empty")
    if messages[-1]["role"] == "assistant":
        return Fault(
            f"{data.prompt_column!r} ends with the assistant's own turn, which the model must "
            "write: remove that message"
        )
    if not data.apply_chat_template:
        if isinstance(prompt, str):
            return prompt
        return Fault("chat messages, which need data.apply_chat_template=true")
    messages = _with_image_parts(data, row, messages)
    if isinstance(messages, Fault):
        return messages
    if data.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        return Fault("its own system message in addition to data.system_prompt")
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _with_image_parts(
    data: DataConfig, row: Row, messages: list[dict[str, Any]]
) -> list[dict[str, Any]] | Fault:
    """Put the row's images, as parts, before the text of the user's first message."""
    if data.image_column and any(IMAGE_MARK in message["content"] for message in messages):
        return Fault(
            f"{data.prompt_column!r} has {IMAGE_MARK} in its text: take it out, as images come "
            "before the user's first text"
        )
    if isinstance(images := images_of(data, row), Fault):
        return images
    if not images:
        return messages
    first = next((i for i, each in enumerate(messages) if each["role"] == "user"), None)
    if first is None:
        return Fault(f"{data.prompt_column!r} has no message of the user, which images come before")
    text = {"type": "text", "text": messages[first]["content"]}
    parts = [*({"type": "image"} for _ in images), text]
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def _check_column(column: str, row: Row) -> Fault | None:
    """Find the fault of a column's value, whatever the column is used for."""
    if column not in row:
        return Fault(f"no column {column!r}")
    value = row[column]
    if value is None or value != value:  # NaN is null in numeric tables
        return Fault(f"{column!r} is null")
    if isinstance(value, str) and not is_unicode(value):
        return Fault(f"{column!r} is not valid Unicode")
    return None


def _messages(column: str, prompt: Any) -> list[dict[str, Any]] | Fault:
    """Convert a prompt to messages whose contents are texts."""
    kind = f"{column!r} is neither a text nor messages with role and content"
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        return Fault(kind, reprlib.repr(prompt))
    messages = []
    for number, given in enumerate(prompt, start=1):
        try:
            messages.append(message_of_data(given))
        except ValueError as error:
            advice = "; data.image_column names the column of images" * ("image" in str(error))
            return Fault(kind, f"message {number}, {reprlib.repr(given)}: {error}{advice}")
    return messages


def render_chats(data: DataConfig, tokenizer: "PreTrainedTokenizerBase", chats: Any) -> Any:
    """Render a chat, or each chat of a list, up to the beginning of the model's turn."""
    return tokenizer.apply_chat_template(
        chats, tokenize=False, add_generation_prompt=True, **data.template_variables
    )


def writes_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return re.search(r"\bstrftime_now\b", str(tokenizer.chat_template)) is not None


def _render(
    data: DataConfig, tokenizer: "PreTrainedTokenizerBase", chats: list[Any]
) -> Sequence[str | Fault]:
    """Render all chats at once, or one by one if the template refuses some."""

    def render_one(chat: Any) -> str | Fault:
        try:
            text: str = render_chats(data, tokenizer, chat)
        except TEMPLATE_ERRORS as error:
            return Fault("refused by the chat template", str(error))
        return text

    try:
        texts: list[str] = render_chats(data, tokenizer, chats)
    except TEMPLATE_ERRORS:
        return [render_one(chat) for chat in chats]
    return texts


def _tokenize(
    data: DataConfig, tokenizer: "PreTrainedTokenizerBase", texts: list[Any]
) -> list[Encoded | Fault]:
    """Tokenize many texts at once, as fast tokenizers then use all cores."""
    token_ids = [
        array("i", ids)
        for start in range(0, len(texts), TEXTS_AT_ONCE)
        for ids in tokenizer(
            texts[start : start + TEXTS_AT_ONCE],
            # A chat template has already written the special tokens.
            add_special_tokens=not data.apply_chat_template,
        )["input_ids"]
    ]
    if not any(token_ids):
        raise ValueError(
            f"the model's tokenizer finds no tokens in {data.path}: are its files "
            "(tokenizer.json) in model.path?"
        )
    return [
        Encoded(text, ids) if ids else Fault("no tokens")
        for text, ids in zip(texts, token_ids, strict=True)
    ]
