"""One completion that engines are asked for."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_grpo.data.samples import seed_after
from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import ROUTES_START, Json

Decode = Callable[[Sequence[int]], str]
"""The text of sampled tokens, without special ones."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded text of an incomplete character."""


def _new_answer() -> "asyncio.Future[tuple[Choice, str]]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Request:
    """A completion, from the request until some engine has answered all of it.

    Engines may abort it at any token, for a checkpoint or because they are lost: the partial
    completion is `begun`, and the next engine is asked for the rest. Made in the event loop.
    Cancelling `answer` withdraws the request.
    """

    body: Json
    """Body of a request to `engine.GENERATE`."""
    priority: int
    """Lower numbers go first, in the router's queue and at the engine."""
    stop: Sequence[str] = ()
    """Strings that end the completion, also if an engine was lost in the middle of one."""
    url: str = ""
    """The engine to ask, if it serves: it has the session's last turn cached."""
    begun: Choice | None = None
    answer: "asyncio.Future[tuple[Choice, str]]" = field(default_factory=_new_answer)
    """The whole completion, and the address of the engine that ended it."""
    batch: int = 0
    """Requests of one batch share their prompt, and stay together."""

    @property
    def is_open(self) -> bool:
        """Whether it is neither answered nor withdrawn."""
        return not self.answer.done()

    @property
    def rest(self) -> Json:
        """The body of the request for all tokens after those that are `begun`."""
        body = rest_of(self.body, self.begun) if self.begun else self.body
        return {**body, "priority": self.priority}

    def take(self, choice: Choice, url: str, decode: Decode) -> None:
        """Append what the engine at `url` has sampled; the answer is there unless it was cut."""
        if choice.finish_reason == CUT and not choice.token_ids:
            return
        if self.begun:
            choice = joined(self.begun, choice, decode, self.stop)
        self.begun = choice
        if choice.finish_reason != CUT and self.is_open:
            self.answer.set_result((choice, url))


def rest_of(request: Json, begun: Choice) -> Json:
    """The request for the rest of a completion, of which `begun` was sampled before it was cut."""
    params, num_tokens = request["sampling_params"], len(begun.token_ids)
    token_ids = [*request["token_ids"], *begun.token_ids]
    # The routes of all tokens but the last are known, and must stay as they were when the next
    # tokens were sampled: the engine, which computes these tokens anew, may choose others.
    routes = {ROUTES_START: len(token_ids) - 1} if ROUTES_START in params else {}
    return {
        **request,
        "token_ids": token_ids,
        "sampling_params": {
            **params,
            "max_tokens": params["max_tokens"] - num_tokens,
            # The same seed would repeat the random numbers that sampled these tokens.
            "seed": seed_after(params["seed"], num_tokens),
            **routes,
        },
    }


def joined(begun: Choice, rest: Choice, decode: Decode, stop: Sequence[str]) -> Choice:
    """The completion that was cut after `begun` and continued with `rest`; it may be cut again.

    It ends earlier if one of the strings `stop` spans the cut: an engine looks for them in what it
    samples, not in its prompt.
    """
    found = begun.followed_by(rest)
    if num_tokens := num_until_stop(begun.token_ids, rest.token_ids, decode, stop):
        found = found.stopped(num_tokens)
    if found.finish_reason == CUT:
        return found
    # A character whose bytes are on both sides of the cut is in the text of neither part.
    has_end_token = found.finish_reason == "stop" and not stop
    found.text = decode(found.token_ids[:-1] if has_end_token else found.token_ids)
    if ends := _stop_ends(found.text, stop):
        found.text = found.text[: min(ends)]  # the last token may have more text
    return found


def num_until_stop(
    begun: Sequence[int], rest: Sequence[int], decode: Decode, stop: Sequence[str]
) -> int:
    """Number of tokens until a stop string is complete that began in `begun`; 0 if none is.

    Looks after each token, as an engine does, but no further than such a string can reach.
    """
    # The engine has not looked for a stop string in an incomplete character.
    num_seen = len(decode(begun).rstrip(INCOMPLETE)) if stop else 0
    for num_tokens in range(len(begun) + 1, len(begun) + len(rest) + 1) if stop else ():
        # From the first token on: parts decoded each by itself may join to another text.
        text = decode([*begun, *rest][:num_tokens])
        if _stop_ends(text, stop, num_seen):
            return num_tokens
        if len(text.rstrip(INCOMPLETE)) >= num_seen + max(map(len, stop)):
            break
    return 0


def _stop_ends(text: str, stop: Sequence[str], num_seen: int = 0) -> list[int]:
    """Ends of the stop strings in `text` that end after `num_seen` characters."""
    starts = [(text.find(each, max(0, num_seen + 1 - len(each))), len(each)) for each in stop]
    return [start + length for start, length in starts if start >= 0]
