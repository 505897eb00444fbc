"""OpenAI's request and answer bodies: chat completions and text completions."""

import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_grpo.agents.chat import BadRequest, Message
from megatron_grpo.unicode import is_unicode

Json = dict[str, Any]
CHANGES_SAMPLING = ("logit_bias", "presence_penalty", "frequency_penalty", "min_p", "top_logprobs")
"""Fields that must be absent or 0: they change sampling, or ask for values that are not kept."""
MOST_CHOICES = 128
"""OpenAI's own limit of `n`; each choice is a task of the event loop."""
FIELDS: Mapping[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "a whole number": ((int,), ("n", "max_tokens", "max_completion_tokens", "seed", "top_k")),
    "a number": ((int, float), ("temperature", "top_p")),
    "true or false": ((bool,), ("stream", "parallel_tool_calls")),
    "true, false or a whole number": ((bool, int), ("logprobs",)),
    "a text": ((str,), ("model",)),
    "a text, or a list of texts": ((str, list), ("stop",)),
    "a list": ((list,), ("tools",)),
    "an object": ((dict,), ("stream_options", "response_format", "metadata")),
}
"""Types of a request's fields, ignored ones included; null counts as absent."""


@dataclass(frozen=True)
class Options:
    """Fields of a request that have an effect, on both routes.

    `temperature`, `top_p`, `top_k`, `seed` and `model` have none: the run's config sets how tokens
    are sampled, since the trainer must reproduce their probabilities.
    """

    num: int
    max_tokens: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with a `usage` chunk."""
    has_logprobs: bool

    @classmethod
    def of(cls, body: Json) -> "Options":
        """Read a request; raises BadRequest for fields of wrong types, and for sampling that the
        trainer could not reproduce."""
        _check_types(body)
        for name in CHANGES_SAMPLING:
            if body.get(name):
                raise BadRequest(
                    f"{name} is not supported: the trainer must know the probability with which "
                    "each token was sampled; leave it out"
                )
        if (body.get("response_format") or {"type": "text"}).get("type") != "text":
            raise BadRequest("response_format is not supported: constraints change what is sampled")
        num, stop = body.get("n"), body.get("stop") or ()
        if (max_tokens := body.get("max_completion_tokens")) is None:
            max_tokens = body.get("max_tokens")
        if [each for each in (num, max_tokens) if each is not None and each < 1]:
            raise BadRequest("n and max_tokens must be at least 1")
        options = cls(
            num=num or 1,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            is_streamed=bool(body.get("stream")),
            has_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            has_logprobs=body.get("logprobs") not in (None, False),
        )
        if options.num > MOST_CHOICES:
            raise BadRequest(f"n {options.num} must be at most {MOST_CHOICES}")
        if [each for each in options.stop if not (isinstance(each, str) and each)]:
            raise BadRequest("stop strings must be texts that are not empty")
        if not all(map(is_unicode, options.stop)):
            raise BadRequest(
                f"stop {[*options.stop]} has half of a surrogate pair, which is in no text of the "
                "model: correct it, or leave it out"
            )
        return options


def _check_types(body: Json) -> None:
    for words, (types, names) in FIELDS.items():
        for name in names:
            value = body.get(name)
            # bool is a subclass of int, and `"n": true` is no number.
            is_right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if value is not None and not is_right:
                raise BadRequest(f"{name} must be {words}, not {reprlib.repr(value)}")


def tools_of(body: Json) -> Any:
    """Tools of a request, None without any; raises BadRequest for a forced `tool_choice`."""
    choice = body.get("tool_choice", "auto")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice {choice} is not supported: it would change what is sampled; use auto or "
            "none"
        )
    tools = body.get("tools") or ()
    if not all(map(_is_tool, tools)):
        raise BadRequest(
            "each of tools must be an object with a function: a name, and perhaps a description (a "
            "text) and parameters (an object)"
        )
    return None if choice == "none" else [*tools] or None


def _is_tool(given: Any) -> bool:
    function = given.get("function") if isinstance(given, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("description"), str | None)
        and isinstance(function.get("parameters"), dict | None)
    )


@dataclass(frozen=True)
class Answered:
    """A turn of the model, ready to be sent."""

    message: Message
    """The assistant's message in OpenAI's form."""
    finish_reason: str
    num_prompt: int
    num_sampled: int
    tokens: Sequence[tuple[str, float]]
    """Text and log-probability of each token; empty unless the request asks for them."""


class Route(NamedTuple):
    """Answer format of /v1/chat/completions or /v1/completions: for an answer and for the chunks of
    a stream, the field `object`, and the `choices` of (index, turn)."""

    kind: str
    choice: Callable[[int, Answered], Json]
    chunk_kind: str
    chunks: Callable[[int, Answered], Iterable[Json]]

    def answer(self, turns: Sequence[Answered], model: str, name: str) -> Json:
        choices = [self.choice(index, turn) for index, turn in enumerate(turns)]
        return {**_frame(self.kind, model, name), "choices": choices, "usage": _usage(turns)}

    def stream(
        self, turns: Sequence[Answered], model: str, name: str, options: Options
    ) -> Iterator[Json]:
        """Chunks of a streamed answer. A turn is not split: tool calls are parsed at its end."""
        frame = _frame(self.chunk_kind, model, name)
        for index, turn in enumerate(turns):
            for choice in self.chunks(index, turn):
                yield {**frame, "choices": [choice]}
        if options.has_usage:
            yield {**frame, "choices": [], "usage": _usage(turns)}


def _usage(turns: Sequence[Answered]) -> Json:
    prompt, sampled = turns[0].num_prompt, sum(turn.num_sampled for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _frame(kind: str, model: str, name: str) -> Json:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _chat_choice(index: int, turn: Answered) -> Json:
    return {
        "index": index,
        "message": turn.message,
        "finish_reason": turn.finish_reason,
        "logprobs": _chat_logprobs(turn),
    }


def _chat_chunks(index: int, turn: Answered) -> Iterator[Json]:
    delta = dict(turn.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    logprobs = _chat_logprobs(turn)
    yield {"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
    yield {"index": index, "delta": {}, "finish_reason": turn.finish_reason}


def _text_choice(index: int, turn: Answered) -> Json:
    logprobs = None
    if turn.tokens:
        logprobs = {
            "tokens": [text for text, _ in turn.tokens],
            "token_logprobs": [logprob for _, logprob in turn.tokens],
        }
    return {
        "index": index,
        "text": turn.message["content"],
        "finish_reason": turn.finish_reason,
        "logprobs": logprobs,
    }


def _text_chunks(index: int, turn: Answered) -> Iterator[Json]:
    yield _text_choice(index, turn)


def _chat_logprobs(turn: Answered) -> Json | None:
    if not turn.tokens:
        return None
    content = [
        {"token": text, "logprob": p, "bytes": [*text.encode()], "top_logprobs": []}
        for text, p in turn.tokens
    ]
    return {"content": content}


def error_body(text: str, kind: str, code: str | None = None) -> Json:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


CHAT = Route("chat.completion", _chat_choice, "chat.completion.chunk", _chat_chunks)
TEXT = Route("text_completion", _text_choice, "text_completion", _text_chunks)
