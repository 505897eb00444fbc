"""OpenAI's bodies of requests and answers: chat completions and text completions."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_grpo.agents.chat import BadRequest, Message

Json = dict[str, Any]
CHANGES_SAMPLING = ("logit_bias", "presence_penalty", "frequency_penalty", "min_p", "top_logprobs")
"""Fields that change what a model samples, or show more of it than is kept; they must be 0."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for, of either route.

    How tokens are sampled is the run's and not the request's: the trainer must know. So
    `temperature`, `top_p`, `top_k`, `seed` and `model` have no effect.
    """

    num: int
    max_tokens: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    has_logprobs: bool

    @classmethod
    def of(cls, body: Json) -> "Asked":
        """Read a request; raises BadRequest for what the trainer could not reproduce."""
        for name in CHANGES_SAMPLING:
            if body.get(name):
                raise BadRequest(
                    f"{name} is not supported: the trainer must know the probability with which "
                    "each token was sampled; leave it out"
                )
        if (body.get("response_format") or {"type": "text"}).get("type") != "text":
            raise BadRequest("response_format is not supported: constraints change what is sampled")
        stop = body.get("stop") or ()
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        asked = cls(
            num=body.get("n") or 1,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            is_streamed=bool(body.get("stream")),
            has_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            has_logprobs=body.get("logprobs") not in (None, False),
        )
        are_right = (
            isinstance(asked.num, int)
            and asked.num >= 1
            and (max_tokens is None or (isinstance(max_tokens, int) and max_tokens >= 1))
            and all(isinstance(each, str) and each for each in asked.stop)
        )
        if not are_right:
            raise BadRequest("n and max_tokens must be at least 1, and stop strings not empty")
        return asked


def tools_of(body: Json) -> Any:
    """The tools that the model is told of; raises BadRequest if it would be forced to call one."""
    choice = body.get("tool_choice", "auto")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice {choice} is not supported: it would change what is sampled; use auto or "
            "none"
        )
    return None if choice == "none" else body.get("tools") or None


@dataclass(frozen=True)
class Answered:
    """One turn of the model, for an answer."""

    message: Message
    """An assistant's, in OpenAI's form."""
    finish_reason: str
    num_prompt: int
    num_sampled: int
    tokens: Sequence[tuple[str, float]]
    """Text and log-probability of each token; empty unless the request asks for them."""


class Route(NamedTuple):
    """How /v1/chat/completions or /v1/completions answers: `object` of an answer and of the chunks
    of a stream, and what a turn, with its number, becomes in each."""

    kind: str
    choice: Callable[[int, Answered], Json]
    chunk_kind: str
    chunks: Callable[[int, Answered], Iterable[Json]]

    def answer(self, turns: Sequence[Answered], model: str, name: str) -> Json:
        """The body of an answer."""
        choices = [self.choice(index, turn) for index, turn in enumerate(turns)]
        return {**_frame(self.kind, model, name), "choices": choices, "usage": _usage(turns)}

    def stream(
        self, turns: Sequence[Answered], model: str, name: str, asked: Asked
    ) -> Iterator[Json]:
        """The same as a stream; a turn comes whole, as it is parsed when all of it is there."""
        frame = _frame(self.chunk_kind, model, name)
        for index, turn in enumerate(turns):
            for choice in self.chunks(index, turn):
                yield {**frame, "choices": [choice]}
        if asked.has_usage:
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
    """The body of an answer that is an error."""
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


CHAT = Route("chat.completion", _chat_choice, "chat.completion.chunk", _chat_chunks)
TEXT = Route("text_completion", _text_choice, "text_completion", _text_chunks)
