"""An engine's answer to a request for a completion."""

import io
from typing import Annotated

import msgspec
import numpy as np

CUT = "abort"
"""`finish_reason` of a completion that an engine gave up."""
NOT_FINITE = -9999.0
"""Substitute that engines send for a log-probability that is not finite."""


# gc=False: without references, tokens need no visits of the garbage collector.
class Token(msgspec.Struct, gc=False):
    """The log-probability of a sampled token."""

    logprob: float


class Logprobs(msgspec.Struct):
    """The log-probabilities of a completion."""

    content: list[Token]


class WeightVersion(msgspec.Struct):
    """The version of the weights that sampled the tokens from `start` to `end` of a completion."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """A completion; the fields are those of vLLM's answer."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str
    text: str
    weight_versions: list[WeightVersion]
    routed_experts: bytes | None = None
    """`routes` as a .npy file, base64 in the answer; None unless the engine returns them."""

    @property
    def token_logprobs(self) -> list[float]:
        return [token.logprob for token in self.logprobs.content]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Weight version and number of tokens of each part, such as [(3, 120), (4, 56)]."""
        return [(int(each.version), each.end - each.start) for each in self.weight_versions]

    @classmethod
    def empty(cls) -> "Choice":
        """A completion without tokens yet, for `append`."""
        return cls([], Logprobs([]), CUT, "", [])

    def append(self, chunk: "Choice") -> None:
        """Append the next chunk of a stream. Its versions and routes cover all tokens so far, and
        replace the earlier ones."""
        self.token_ids += chunk.token_ids
        self.logprobs.content += chunk.logprobs.content
        self.finish_reason = chunk.finish_reason
        self.text += chunk.text
        self.weight_versions = chunk.weight_versions
        self.routed_experts = chunk.routed_experts

    def followed_by(self, rest: "Choice") -> "Choice":
        """Concatenate a cut completion and its continuation, without text; changes neither."""
        spans, start = [*self.weight_versions], len(self.token_ids)
        for span in rest.weight_versions:
            begin = start + span.start
            if spans and spans[-1].version == span.version:  # one span for each version
                begin = spans.pop().start
            spans.append(WeightVersion(span.version, begin, start + span.end))
        known = self.routed_experts
        return Choice(
            token_ids=self.token_ids + rest.token_ids,
            logprobs=Logprobs(self.logprobs.content + rest.logprobs.content),
            finish_reason=rest.finish_reason,
            text="",  # the cut may be inside a character: `request.joined` decodes all tokens anew
            weight_versions=spans,
            routed_experts=known and npy_of(np.concatenate([self.routes, rest.routes])),
        )

    def stopped(self, num_tokens: int) -> "Choice":
        """Truncate to `num_tokens`, where a stop string ends; without text."""
        known, num_dropped = self.routed_experts, len(self.token_ids) - num_tokens
        return Choice(
            token_ids=self.token_ids[:num_tokens],
            logprobs=Logprobs(self.logprobs.content[:num_tokens]),
            finish_reason="stop",
            text="",
            weight_versions=[
                WeightVersion(span.version, span.start, min(span.end, num_tokens))
                for span in self.weight_versions
                if span.start < num_tokens
            ],
            # From the end: the prompt's routes come first.
            routed_experts=known and npy_of(self.routes[: len(self.routes) - num_dropped]),
        )

    @property
    def routes(self) -> np.ndarray:
        """Experts of every token but the last: [tokens, layers, columns] uint8, int16 or int32.

        Further columns are the positions that indexers chose, if the engine returns them. Decoded
        at each access, so that only the file is kept. ValueError without routes.
        """
        if not self.routed_experts:
            raise ValueError("the answer does not have the routes of its tokens")
        routes: np.ndarray = np.load(io.BytesIO(self.routed_experts), allow_pickle=False)
        # vLLM's for more than 256 experts is uint16, for which torch has few operations.
        return routes.astype(np.int16) if routes.dtype == np.uint16 else routes


def smallest(routes: np.ndarray) -> np.ndarray:
    """Cast to the smallest type that holds all numbers: uint8, int16 or int32."""
    least, most = routes.min(initial=0), routes.max(initial=0)
    limits = [np.iinfo(each) for each in (np.uint8, np.int16, np.int32)]
    return routes.astype(
        next(each for each in limits if each.min <= least and most <= each.max).dtype
    )


def fault_of_chosen(routes: np.ndarray, start: int, index_topk: int) -> str:
    """Describe the first invalid choice of an indexer from position `start` on; empty if none.

    The token at position p may choose 0 to p. The first `index_topk` tokens attend to all.
    """
    if routes.ndim != 3 or routes.shape[2] < index_topk:
        return (
            f"an array of shape {routes.shape}, and not [tokens, layers, {index_topk} tokens that "
            "indexers choose, after the experts]: start it with the same config"
        )
    first = max(index_topk, start)
    chosen = routes[first - start :, :, -index_topk:]
    positions = np.arange(first, first + len(chosen))[:, None, None]
    is_wrong = (chosen < 0) | (chosen > positions)
    if not is_wrong.any():
        return ""
    token, layer, _ = np.argwhere(is_wrong)[0]
    return (
        f"{int(chosen[is_wrong][0])} as a token that the indexer of layer {layer} chose for the "
        f"token at position {first + token}, which sees none but those at 0 to {first + token}: "
        "SGLang returns positions in a sequence only with SGLANG_DSA_FUSE_TOPK=0"
    )


def npy_of(routes: np.ndarray) -> bytes:
    """Encode routes as `Choice.routed_experts`."""
    np.save(file := io.BytesIO(), routes)
    return file.getvalue()


class Answer(msgspec.Struct):
    """The body of an answer: one completion."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


class Chunk(msgspec.Struct):
    """Part of a streamed completion, in vLLM's fields."""

    token_ids: list[int]
    logprobs: Logprobs
    text: str
    weight_versions: list[WeightVersion]
    """Versions of all tokens so far."""
    finish_reason: str | None
    """None before the last chunk."""
    routed_experts: bytes | None = None


class Failure(msgspec.Struct):
    """Why a stream ends early."""

    message: str
    code: int
    """HTTP status code of the failure."""


class Event(msgspec.Struct):
    """One event of a stream: a chunk of its one completion, or a failure."""

    choices: Annotated[list[Chunk], msgspec.Meta(max_length=1)] = []
    error: Failure | None = None


_DECODER = msgspec.json.Decoder(Answer)
_EVENT_DECODER = msgspec.json.Decoder(Event)


def decode_choice(answer: bytes) -> Choice:
    """Decode the completion in a body; raises msgspec.MsgspecError if there is none."""
    # Some 200 bytes per token: `json.loads` would hold the interpreter's lock twenty times as long,
    # and the training thread would wait.
    [choice] = _DECODER.decode(answer).choices
    return choice


def decode_event(data: bytes | bytearray) -> Choice | Failure:
    """Decode an event of a stream: a chunk, with CUT before the last one, or a failure; raises
    msgspec.MsgspecError for neither."""
    event = _EVENT_DECODER.decode(data)
    if event.error:
        return event.error
    if not event.choices:
        raise msgspec.ValidationError("an event without a chunk")
    [chunk] = event.choices
    return Choice(
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        finish_reason=chunk.finish_reason or CUT,
        text=chunk.text,
        weight_versions=chunk.weight_versions,
        routed_experts=chunk.routed_experts,
    )
