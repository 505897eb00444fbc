"""What one worker of an engine knows of the push of weights under way, and says of its parameters.

The same in vLLM's workers and in the transformers engine.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Json = dict[str, Any]

LOADED_VERSION = 0
"""Of weights that no push has brought."""
LOADED = f"{LOADED_VERSION}-loaded"
"""In the place of a push: what the engine has loaded from its own folder when it started."""


@dataclass
class PushState:
    """Which push the worker's weights are of."""

    links: str = ""
    """Name of the links that it has, or should have: each trainer makes its own."""
    push: str = ""
    """The push that began last."""
    is_loaded: bool = False
    """Whether that push has written every parameter."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """The checksum of every parameter, by name, since it has."""
    error: str = ""
    """Why it has not, or why there are no links to receive it."""
    held: str = ""
    """The push whose weights these are; empty until one is complete and whenever one is open."""

    def connect(self, links: str) -> None:
        """From here on weights come over `links` alone; a push over others is over."""
        self.links = links
        self.push, self.is_loaded, self.held = "", False, ""

    def begin(self, push: str, links: str) -> None:
        """From here on these are nobody's weights; an earlier push that is open is over.

        Nothing begins when another trainer has connected since. An error is kept: it is that of
        the links, which were made before.
        """
        if links == self.links:
            self.push, self.is_loaded, self.held = push, False, ""

    def load(self, sums: Mapping[str, int]) -> None:
        """Every parameter is written, and holds what has that checksum."""
        self.is_loaded, self.sums = True, sums

    def finish(self) -> None:
        """The weights are in place already; from here on they are those of the push."""
        if self.is_loaded:
            self.held = self.push

    def hold_loaded(self) -> None:
        """Serve the weights that the engine has loaded itself, unless a push has touched them."""
        if not self.links and not self.push:
            self.held = LOADED

    def report(self) -> Json:
        """The state of the push, for `push_check`."""
        return {
            "push": self.push,
            "is_loaded": self.is_loaded,
            "error": self.error,
            "sums": self.sums,
        }

    @contextmanager
    def keep_error(self) -> Iterator[None]:
        """Keep what is raised in the block, with a traceback for the log; nothing leaves it."""
        self.error = ""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.error = str(error) or repr(error)


def parameter_table(parameters: Mapping[str, "Tensor"]) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype (``bfloat16``) of every parameter, by name."""
    return {
        name: (list(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in parameters.items()
    }
