"""Parameters that Muon updates; without torch, so that `plan` knows, too."""

from collections.abc import Iterator

from parallel import Layout, Shape

EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Suffixes of the names of embedding and head, which AdamW updates: a row is of one token."""
PLACES = "visual.pos_embed.weight"
"""Likewise of a vision tower's embedding: a row is of one place in an image."""

MAX_EXCHANGED = 2**26
"""Elements of matrices that a rank receives at a time, unless one has more: 256 MiB in float32."""


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether Muon updates a parameter of this name, by Megatron-Core, and shape.

    A parameter that fuses matrices of the weight files is one like them.
    """
    return len(shape) == 2 and not name.endswith((*EMBEDDINGS, PLACES))


def newton_schulz_flops(shape: Shape) -> int:
    """Operations of the five steps of `muon.newton_schulz`: for X with r <= c rows or columns,
    X X^T, its square, and a product with X, of 2 r^2 c, 2 r^3 and 2 r^2 c."""
    r, c = sorted(shape)
    return 5 * (4 * r**2 * c + 2 * r**3)


def matrices_of(layout: Layout) -> Iterator[str]:
    """Local names of the parameters of a rank that Muon updates."""
    return (name for name, shape in layout.shapes.items() if is_matrix(name, shape))
