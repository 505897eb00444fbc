"""Assembles tensors, one at a time, from boxes of source tensors: the core of every conversion."""

from collections import defaultdict

from checkpoint_convert.formats.torch_dist import StoredChunks
from checkpoint_convert.formats.values import Words, converted
from checkpoint_convert.weights import Weights
from parallel import Box, Copy, Layout, Shape, intersect


class Assembly:
    """Builds the local tensors of a layout from weights in files; reads only the boxes it needs."""

    def __init__(self, weights: Weights | StoredChunks, layout: Layout) -> None:
        layout.check_complete()
        self._source = weights.tensors
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in intersect(weights.layout, layout):
            self._copies[copy.destination].append(copy)
        self._zeros: dict[str, list[Box]] = defaultdict(list)
        for name, box in layout.zeros:
            self._zeros[name].append(box)

    def dtypes(self, name: str) -> set[str]:
        """Stored dtypes of the source values that make up the local tensor `name`."""
        return {self._source.dtypes[copy.source] for copy in self._copies[name]}

    def num_elements(self, name: str) -> int:
        """Number of elements of the local tensor `name` that the source holds."""
        return sum(copy.destination_box.num_elements for copy in self._copies[name])

    def first_source(self, name: str) -> tuple[str, Shape]:
        """Where the local tensor `name` begins in the source: a tensor name and an index."""
        if not self._copies[name]:  # only zeros
            return "", ()
        first = self._copies[name][0]
        return first.source, first.source_box.start

    def fill(self, name: str, words: Words, dtype: str) -> None:
        """Write every element of the local tensor `name` into `words`, as `dtype`."""
        for copy in self._copies[name]:
            target = words[copy.destination_box.slices]
            # Files stack tensors but never transpose them: only dimensions of size 1 differ.
            target = target.reshape(copy.source_box.size, copy=False)
            stored = self._source.dtypes[copy.source]
            if stored == dtype:
                self._source.read_into(copy.source, copy.source_box, target)
            else:
                found = self._source.read(copy.source, copy.source_box)
                target[...] = converted(found, stored, dtype)
        for box in self._zeros[name]:
            words[box.slices] = 0
