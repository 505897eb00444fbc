"""Which parameters Muon updates; without torch, so that `plan` knows, too."""

from collections.abc import Iterator

from parallel import Layout, Shape

EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Suffixes of the names of embedding and head, which AdamW updates: a row is of one token."""
PLACES = "visual.pos_embed.weight"
"""The same of a vision tower's embedding: a row is of one place in an image."""

MAX_EXCHANGED = 2**26
"""Elements of matrices that a rank receives at a time, unless one has more: 256 MiB in float32."""


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether Muon updates a parameter of this name, by Megatron-Core, and shape.

    A parameter that fuses matrices of the weight files is one like them.
    """
    return len(shape) == 2 and not name.endswith((*EMBEDDINGS, PLACES))


def matrices_of(layout: Layout) -> Iterator[str]:
    """Local names of the parameters of a rank that Muon updates."""
    return (name for name, shape in layout.shapes.items() if is_matrix(name, shape))
