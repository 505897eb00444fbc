"""Parameters that Muon updates; without torch, for `plan`."""

from collections.abc import Iterator

from parallel import Layout, Shape

EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Suffixes of the names of embedding and head. AdamW updates them: each row is one token's."""
PLACES = "visual.pos_embed.weight"
"""Suffix of the vision tower's embedding, also for AdamW: each row is one place's in an image."""

MAX_EXCHANGED = 2**26
"""Elements of matrices that a rank receives at a time, or one larger matrix: 256 MiB in float32."""


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether Muon updates the parameter with this name of Megatron-Core's and this shape.

    Parameters that fuse several matrices of the weight files count as well.
    """
    return len(shape) == 2 and not name.endswith((*EMBEDDINGS, PLACES))


def newton_schulz_flops(shape: Shape) -> int:
    """FLOPs of the five steps of `muon.newton_schulz`.

    For X [r, c] with r <= c, a step takes 2 r^2 c for X X^T, 2 r^3 for its square, and 2 r^2 c for
    the product with X.
    """
    r, c = sorted(shape)
    return 5 * (4 * r**2 * c + 2 * r**3)


def matrices_of(layout: Layout) -> Iterator[str]:
    """Local names of a rank's parameters for Muon."""
    return (name for name, shape in layout.shapes.items() if is_matrix(name, shape))
