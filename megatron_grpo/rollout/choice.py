"""A completion as an engine answers it, with only the fields that are used."""

from typing import Annotated

import msgspec


class Token(msgspec.Struct, gc=False):
    """The log-probability of a sampled token."""

    logprob: float


class Logprobs(msgspec.Struct):
    """The log-probabilities of a completion."""

    content: list[Token]


class WeightVersion(msgspec.Struct):
    """A version of the weights that sampled some tokens of a completion."""

    version: str


class Choice(msgspec.Struct):
    """A completion; the fields are those of vLLM's answer."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str
    text: str
    weight_versions: list[WeightVersion]

    @property
    def token_logprobs(self) -> list[float]:
        """The log-probability of each token."""
        return [token.logprob for token in self.logprobs.content]


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
