"""`train.offload`: parts of the training state that leave the GPU, and in which phases of a step.

The schedule only: `policy/residency.py` carries it out, and `planning` counts memory by it.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

Part = Literal["weights", "reference", "gradients", "optimizer"]
Phase = Literal["log-probabilities", "train", "update", "push", "generate"]

PARTS: tuple[Part, ...] = ("weights", "reference", "gradients", "optimizer")
"""In the order of their return: the first two are needed first."""
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
"""Words for several parts, or none. Gradients go with the moments: they are freed at no cost."""
_WITH_ENGINES: tuple[Phase, ...] = ("push", "generate")


def _checked(given: object) -> object:
    """Return `given` if it is a value of `train.offload`; raise ValueError otherwise."""
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
    """Format a value of `train.offload` as a config writes it."""
    return offload if isinstance(offload, str) else f"[{', '.join(map(str, offload))}]"


def parts_used(phase: Phase) -> tuple[Part, ...]:
    return _USED[phase]


def parts_moved(offload: Offload) -> tuple[Part, ...]:
    """Parts that leave the GPU in some phase."""
    named = [offload] if isinstance(offload, str) else offload
    moved = {part for name in named for part in _MOVED.get(name, (name,))}
    return tuple(part for part in PARTS if part in moved)


def parts_copied(offload: Offload) -> list[Part]:
    """Moved parts that are copied to the host."""
    return [part for part in parts_moved(offload) if part not in NOT_COPIED]


def parts_away(offload: Offload, phase: Phase) -> tuple[Part, ...]:
    """Moved parts that are off the GPU in `phase`: unused while engines share its memory."""
    if phase not in _WITH_ENGINES:
        return ()
    return tuple(part for part in parts_moved(offload) if part not in _USED[phase])


FEWER = "fewer parts"
"""Placeholder for a shorter list of parts."""


def smaller(offload: Offload) -> list[str]:
    """Values of `train.offload` that take less host memory than `offload`."""
    if offload == "all":
        return ["optimizer", "none"]
    return [FEWER, "none"] if len(parts_copied(offload)) > 1 else ["none"]


def communicates(phase: Phase) -> bool:
    """Whether ranks may use NCCL in a phase; while engines generate they use gloo."""
    return phase != "generate"
