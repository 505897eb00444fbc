"""`train.offload`: what leaves the GPU, and in which phases of a step.

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


def check_offload(
    offload: Offload, *, with_communicators: bool, engines_sleep: bool, is_optimizer_on_host: bool
) -> None:
    """Raise ValueError if `train.offload` makes no room, or what it should move is not there."""
    if offload != "none" and not engines_sleep:
        raise ValueError(
            f"train.offload {offload} makes room for engines that generate on the ranks' GPUs "
            "while the ranks wait, and give it back: set rollout.enable_sleep_mode=true, "
            "with rollout.max_staleness=0, or train.offload=none"
        )
    if offload != "none" and is_optimizer_on_host:
        raise ValueError(
            f"optimizer.optimizer_cpu_offload true keeps the optimizer on the host for good, "
            f"and train.offload {offload} would move it: leave out one of the two"
        )
    if with_communicators and offload != "all":
        raise ValueError(
            "train.offload_communicators true moves what is left on the GPU when weights have "
            f"left, and train.offload is {offload}: set train.offload=all, or leave it out"
        )


def communicates(phase: Phase) -> bool:
    """Whether ranks may communicate over NCCL in a phase; while engines generate, over gloo."""
    return phase != "generate"
