"""What the workers of the engines need to know to receive weights: plain data, sent as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from parallel.layout import Box
from parallel.transport.buckets import ALIGNMENT
from parallel.transport.meeting import Meeting


@dataclass(frozen=True)
class Invitation:
    """One set of links from trainer ranks to the workers of all engines."""

    __pydantic_config__ = ConfigDict(extra="forbid", hide_input_in_errors=True)

    meeting: Meeting
    bucket_bytes: Annotated[int, Field(gt=0, multiple_of=ALIGNMENT)]
    """Size of each of the two buffers of a link."""
    num_engines: PositiveInt
    network_only: bool
    """If set, links never share memory, even where they could."""
    senders: list[list[NonNegativeInt]]
    """By worker: the trainer ranks that send to it."""
    zeros: list[list[tuple[str, list[NonNegativeInt], list[NonNegativeInt]]]]
    """By worker: name, start and size of padding, which is not sent."""

    def to_json(self) -> dict[str, Any]:
        """The invitation as JSON-serializable data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Invitation":
        """The inverse of `to_json`; ValueError, with what is wrong, for anything else."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except (ValidationError, TypeError) as error:
            raise ValueError(f"not an invitation to receive weights: {error}") from error

    def padding(self, worker: int) -> tuple[tuple[str, Box], ...]:
        """The padding in a worker's parameters, which is not sent: (name, box)."""
        return tuple(
            (name, Box(tuple(start), tuple(size))) for name, start, size in self.zeros[worker]
        )
