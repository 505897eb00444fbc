"""`train.offload`: which parts of the training state leave the GPU, and in which phases of a step.

The schedule alone: `policy/residency.py` carries it out, and `planning` counts by it.
"""

from typing import Literal

Offload = Literal["none", "optimizer", "all"]
Part = Literal["weights", "reference", "gradients", "optimizer"]
Phase = Literal["log-probabilities", "train", "update", "push", "generate"]

PARTS: tuple[Part, ...] = ("weights", "reference", "gradients", "optimizer")
"""In the order in which they come back: the first two are needed first."""
NOT_COPIED: tuple[Part, ...] = ("gradients",)
"""Freed without a copy: a step zeroes gradients before it adds to them."""

_USED: dict[Phase, tuple[Part, ...]] = {
    "log-probabilities": ("weights", "reference"),
    "train": PARTS,
    "update": PARTS,
    "push": ("weights",),
    "generate": (),
}
_MOVED: dict[Offload, tuple[Part, ...]] = {
    "none": (),
    "optimizer": ("gradients", "optimizer"),
    "all": PARTS,
}
_WITH_ENGINES: tuple[Phase, ...] = ("push", "generate")


def parts_used(phase: Phase) -> tuple[Part, ...]:
    """The parts that a phase computes with."""
    return _USED[phase]


def parts_moved(offload: Offload) -> tuple[Part, ...]:
    """The parts that are not on the GPU in some phase."""
    return _MOVED[offload]


def parts_copied(offload: Offload) -> list[Part]:
    """The moved parts whose values are on the host meanwhile."""
    return [part for part in _MOVED[offload] if part not in NOT_COPIED]


def parts_away(offload: Offload, phase: Phase) -> tuple[Part, ...]:
    """The parts that are not on the GPU in `phase`: those unused while engines share its memory."""
    if phase not in _WITH_ENGINES:
        return ()
    return tuple(part for part in _MOVED[offload] if part not in _USED[phase])
