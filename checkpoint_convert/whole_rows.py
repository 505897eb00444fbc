"""Reads whole rows when a box of columns is requested, and keeps them for the other columns."""

import numpy as np

from checkpoint_convert.formats.tensor_io import TensorSource
from checkpoint_convert.formats.values import WORDS, Words
from checkpoint_convert.weights import Weights
from parallel import Box

# Limit for the rows that are kept. If they are larger, only the columns are read.
_MAX_BYTES = 64 << 20


class WholeRows(TensorSource):
    """The tensors of some weights, for a reader that takes all columns of some rows in succession.

    A box of columns is many small pieces of a file, and in a quantized tensor it cuts blocks.
    """

    def __init__(self, weights: Weights) -> None:
        self.dtypes = weights.tensors.dtypes
        self._source = weights.tensors
        self._shapes = weights.layout.shapes
        self._memory: Words = np.empty(0, np.uint8)  # grows; its first touch costs more than a copy
        self._kept: tuple[str, Box] | None = None
        self._rows: Words

    def read(self, name: str, box: Box) -> Words:
        """The words of `box` of a tensor, in the stored dtype; shape `box.size`."""
        words: Words = np.empty(box.size, WORDS[self.dtypes[name]])
        self.read_into(name, box, words)
        return words

    def read_into(self, name: str, box: Box, target: Words) -> None:
        """Put the words of `box` into `target`, from the kept rows if they include it."""
        num_columns = self._shapes[name][-1]
        rows = Box((*box.start[:-1], 0), (*box.size[:-1], num_columns))
        num_bytes = rows.num_elements * WORDS[self.dtypes[name]].itemsize
        if rows == box or num_bytes > _MAX_BYTES:
            self._source.read_into(name, box, target)
            return
        if self._kept != (name, rows):
            self._kept = None
            if num_bytes > self._memory.size:
                self._memory = np.empty(num_bytes, np.uint8)
            words = self._memory[:num_bytes].view(WORDS[self.dtypes[name]])
            self._rows = words.reshape(rows.size)
            self._source.read_into(name, rows, self._rows)
            self._kept = (name, rows)
        target[...] = self._rows[..., box.start[-1] : box.end[-1]]

    def close(self) -> None:
        """Close the files."""
        self._source.close()
