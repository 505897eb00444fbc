"""One data rank's part of an optimizer batch, as it is sent to the ranks: not yet packed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from parallel.alignment import Alignment
from parallel.packing import KNOWN, PackedBatch, TokenSequence, pack


@dataclass(frozen=True, kw_only=True)
class Share:
    """The sequences of one data rank, and which of them make up each microbatch.

    Tokens and their values lie end to end, in one tensor per field of `TokenSequence`: thousands of
    small tensors would take seconds to pickle. Of each token 9 bytes are sent (more if the experts
    of tokens are replayed), where a packed batch has 38, and every rank packs its own.
    """

    microbatches: list[list[int]]
    """Indices in the optimizer batch."""
    columns: dict[str, list[Any] | Tensor]
    """For each field its values of all sequences, in the order of the microbatches: a list of
    them, or tensors joined."""
    lengths: dict[str, list[int]]
    """The lengths of the tensors that were joined."""
    known: list[str]
    """Those of `KNOWN` that the optimizer batch has; this share may have no sequence."""

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], microbatches: list[list[int]]) -> "Share":
        """The share that has these `microbatches` of an optimizer batch of `sequences`.

        Each field must be a tensor in all `sequences` or in none.
        """
        chosen = [sequences[i] for i in chain(*microbatches)]
        columns: dict[str, list[Any] | Tensor] = {}
        lengths: dict[str, list[int]] = {}
        for field in fields(TokenSequence):
            values = [getattr(sequence, field.name) for sequence in chosen]
            columns[field.name] = values
            if values and isinstance(values[0], Tensor):
                columns[field.name] = torch.cat(values)
                lengths[field.name] = [len(value) for value in values]
        return cls(
            microbatches=microbatches,
            columns=columns,
            lengths=lengths,
            known=[name for name in KNOWN if getattr(sequences[0], name) is not None],
        )

    def pack(self, alignment: Alignment, *, share_prompts: bool) -> list[PackedBatch]:
        """Pack the microbatches; see `parallel.packing.pack`."""
        sequences = dict(zip(chain(*self.microbatches), self._sequences(), strict=True))
        return [
            pack(sequences, indices, alignment, share_prompts=share_prompts, known=self.known)
            for indices in self.microbatches
        ]

    def _sequences(self) -> Iterator[TokenSequence]:
        values = [
            column.split(self.lengths[name]) if isinstance(column, Tensor) else column
            for name, column in self.columns.items()
        ]
        for of_sequence in zip(*values, strict=True):
            yield TokenSequence(**dict(zip(self.columns, of_sequence, strict=True)))
