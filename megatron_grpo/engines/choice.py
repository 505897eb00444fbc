"""What an engine answers to a request for a completion."""

import io
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np

CUT = "abort"
"""`finish_reason` of a completion that an engine gave up."""
NOT_FINITE = -9999.0
"""What an engine sends instead of a log-probability that is not finite."""


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


class Choice(msgspec.Struct, dict=True):
    """A completion; the fields are those of vLLM's answer."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str
    text: str
    weight_versions: list[WeightVersion]
    routed_experts: bytes | None = None
    """A `.npy` file, base64 in the answer; None unless the engine returns the experts of tokens."""

    @property
    def token_logprobs(self) -> list[float]:
        """The log-probability of each token."""
        return [token.logprob for token in self.logprobs.content]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Version of the weights and number of tokens, of each part."""
        return [(int(each.version), each.end - each.start) for each in self.weight_versions]

    def followed_by(self, rest: "Choice", text: str) -> "Choice":
        """This completion, which was cut, and what was sampled after it; `text` is of both.

        Neither is changed, so that another thread may read them.
        """
        spans, start = [*self.weight_versions], len(self.token_ids)
        for span in rest.weight_versions:
            begin = start + span.start
            if spans and spans[-1].version == span.version:
                begin = spans.pop().start
            spans.append(WeightVersion(span.version, begin, start + span.end))
        return Choice(
            token_ids=self.token_ids + rest.token_ids,
            logprobs=Logprobs(self.logprobs.content + rest.logprobs.content),
            finish_reason=rest.finish_reason,
            text=text,
            weight_versions=spans,
        )

    def stopped(self, num_tokens: int) -> "Choice":
        """The first tokens of this completion, whose text ends it there; without their text."""
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
        )

    @cached_property
    def routes(self) -> np.ndarray:
        """[tokens, layers, topk] uint8 or int16: the experts that processed each token of prompt
        and completion, but for the last token.

        Raises ValueError if the engine did not return them.
        """
        if not self.routed_experts:
            raise ValueError("the answer does not have the experts of its tokens")
        routes: np.ndarray = np.load(io.BytesIO(self.routed_experts), allow_pickle=False)
        # vLLM's for more than 256 experts is uint16, for which torch has few operations.
        return routes if routes.dtype == np.uint8 else routes.astype(np.int16)


class Answer(msgspec.Struct):
    """The answer to a request, which is for one completion."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]


_DECODER = msgspec.json.Decoder(Answer)


def decode_choice(answer: bytes) -> Choice:
    """The completion in the body of an answer; raises msgspec.MsgspecError if there is none.

    An answer has some 200 bytes per token, and decoding it holds the interpreter's lock, for which
    a training thread would wait: this takes a twentieth of the time of `json.loads`.
    """
    [choice] = _DECODER.decode(answer).choices
    return choice
