"""`train.offload`: what leaves the GPU, and in which phases of a step.

The schedule alone: `policy/residency.py` carries it out, and `planning` counts by it.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

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
_MOVED: dict[str, tuple[Part, ...]] = {
    "none": (),
    "optimizer": ("gradients", "optimizer"),
    "all": PARTS,
}
"""Words that are no part, or more than one. Gradients cost nothing beside moments."""
_WITH_ENGINES: tuple[Phase, ...] = ("push", "generate")


def _checked(given: object) -> object:
    """`given`, if it is a value of `train.offload`; ValueError otherwise."""
    legal = f"it is {', '.join(_MOVED)}, or a list of {', '.join(sorted(PARTS))}"
    if isinstance(given, str) and given in _MOVED:
        return given
    if not isinstance(given, list | tuple):
        raise ValueError(f"train.offload {given!r}: {legal}")
    for part in given:
        if part not in PARTS:
            raise ValueError(f"train.offload {words(given)} has {part!r}: {legal}")
        if given.count(part) > 1:
            raise ValueError(f"train.offload {words(given)} has {part} twice: leave out one")
    return given


Offload = Annotated[
    Literal["none", "optimizer", "all"] | Annotated[tuple[Part, ...], Field(strict=False)],
    BeforeValidator(_checked),
]


def words(offload: str | Sequence[object]) -> str:
    """A value of `train.offload` as a config has it."""
    return offload if isinstance(offload, str) else f"[{', '.join(map(str, offload))}]"


def parts_used(phase: Phase) -> tuple[Part, ...]:
    return _USED[phase]


def parts_moved(offload: Offload) -> tuple[Part, ...]:
    """The parts that are not on the GPU in some phase."""
    named = [offload] if isinstance(offload, str) else offload
    moved = {part for name in named for part in _MOVED.get(name, (name,))}
    return tuple(part for part in PARTS if part in moved)


def parts_copied(offload: Offload) -> list[Part]:
    """The moved parts whose values are on the host meanwhile."""
    return [part for part in parts_moved(offload) if part not in NOT_COPIED]


def parts_away(offload: Offload, phase: Phase) -> tuple[Part, ...]:
    """The parts that are not on the GPU in `phase`: those unused while engines share its memory."""
    if phase not in _WITH_ENGINES:
        return ()
    return tuple(part for part in parts_moved(offload) if part not in _USED[phase])


FEWER = "fewer parts"
"""Stands for a shorter list in place of a value of `train.offload`."""


def smaller(offload: Offload) -> list[str]:
    """Values of `train.offload` that take less host memory than one that takes some."""
    if offload == "all":
        return ["optimizer", "none"]
    return [FEWER, "none"] if len(parts_copied(offload)) > 1 else ["none"]


def communicates(phase: Phase) -> bool:
    """Whether ranks may communicate over NCCL in a phase; while engines generate, over gloo."""
    return phase != "generate"
