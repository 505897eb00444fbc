"""Weights that are computed when they are read: with adapters merged, or rounded."""

from collections.abc import Callable, Container, Iterator, Mapping
from threading import local

from torch import Tensor


class Computed(Mapping[str, Tensor]):
    """Weights of which those named `computed` are made per access, without a copy of the model."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        computed: Container[str],
        compute: Callable[[str], Tensor],
    ) -> None:
        # A push reads a weight box by box, in threads: each thread keeps its last computed weight.
        self._weights, self._computed, self._compute = weights, computed, compute
        self._last = local()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            return self._weights[name]
        if getattr(self._last, "name", None) != name:
            self._last.values = self._compute(name)
            self._last.name = name
        return self._last.values

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
