"""One rank of a job as Megatron-Core makes it, on torch's meta device, held against its layout."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_convert import ModelShape
from megatron_grpo.checkpoints.megatron_state import OPTIMIZER_STATES, weight_layout
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import (
    Model,
    Policy,
    add_gradients,
    add_optimizer,
    build_model,
    weight_sender,
)
from parallel import Layout, Piece, Sender, Shape
from parallel.fake_rank import fake_rank, without_memory


@dataclass(frozen=True, kw_only=True)
class BuiltRank:
    """A rank as its modules are; bytes are those of its memory."""

    sender: Sender
    """What it holds, with the layout that its modules were compared with, and can send."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    faults: tuple[str, ...]
    """In what the modules are not as planned."""


def build_rank(cfg: Config, shape: ModelShape, rank: int, saved: Layout) -> BuiltRank:
    """Build the modules, gradient buffers and optimizer of a rank without their memory.

    `saved` is the `checkpoint_layout` of the model. `setup_device` comes first.
    """
    with fake_rank(cfg.dims, rank) as groups:
        with without_memory():
            model = build_model(cfg, shape, groups)
            add_gradients(model)
            policy = add_optimizer(model, cfg)
        faults = compare(policy, saved, getattr(torch, cfg.model.dtype))
        return BuiltRank(
            sender=weight_sender(policy, groups),
            weight_bytes=sum(each.nbytes for each in policy.parameters().values()),
            gradient_bytes=gradient_bytes(policy),
            optimizer_bytes=optimizer_bytes(policy),
            faults=tuple(f"rank {rank}: {fault}" for fault in faults),
        )


def gradient_bytes(policy: Policy) -> int:
    """Of the buffers of all gradients, padding included."""
    return sum(
        buffer.grad_data.nbytes
        for chunk in policy.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    )


def optimizer_bytes(policy: Policy) -> int:
    """Of this rank's share of master weights and moments.

    Some optimizers make the moments at the first step only; here they count from the start. Master
    copies of float32 weights are the weights themselves, and do not count.
    """
    masters = sum(
        parameter.nbytes
        for part in policy.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    )
    is_copied = any(p.dtype != torch.float32 for p in policy.parameters().values())
    return masters * (len(OPTIMIZER_STATES) - (not is_copied))


def compare(model: Model, saved: Layout, dtype: torch.dtype) -> Iterator[str]:
    """In what the modules of a rank differ from its layout.

    Names, shapes and types first; then which elements of the model they are, which Megatron-Core
    says in the coordinates of a checkpoint (`saved`).
    """
    different = list(_differing_shapes(model, dtype))
    yield from different
    if not different:
        yield from _differing_places(weight_layout(model).through(saved), model.layout)
    try:
        model.layout.check_complete()
    except ValueError as error:
        yield str(error)


def _differing_shapes(model: Model, dtype: torch.dtype) -> Iterator[str]:
    built: dict[str, Any] = {
        name: (tuple(parameter.shape), parameter.dtype)
        for name, parameter in model.parameters().items()
    }
    planned: dict[str, Any] = {name: (size, dtype) for name, size in model.layout.shapes.items()}
    for name in {**built, **planned}:
        if built.get(name) != planned.get(name):
            yield f"{name} is {_words(built, name)} as built and {_words(planned, name)} as planned"


def _words(tensors: dict[str, Any], name: str) -> str:
    if name not in tensors:
        return "absent"
    size, dtype = tensors[name]
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"


def _differing_places(built: Layout, planned: Layout) -> Iterator[str]:
    found, wanted = _places(built.pieces), _places(planned.pieces)
    for name in planned.shapes:
        own, other = found.get(name, set()), wanted.get(name, set())
        if own != other:
            yield (
                f"{name} holds {_first(own - other)} as built and {_first(other - own)} as planned"
            )


Place = tuple[str, Shape, Shape, Shape]
"""A tensor of the model, first index and extent of a box of it, and where that begins locally."""


def _places(pieces: Iterable[Piece]) -> dict[str, set[Place]]:
    """Of each local tensor: which box of it is which of the model's."""
    places: dict[str, set[Place]] = {}
    for piece in pieces:
        # A checkpoint's stacks have dimensions in front that the parameter lacks.
        depth = len(piece.local_box.start) - len(piece.box.start)
        place = piece.tensor, piece.box.start, piece.box.size, piece.local_box.start[depth:]
        places.setdefault(piece.local, set()).add(place)
    return places


def _first(places: set[Place]) -> str:
    if not places:
        return "nothing more"
    tensor, start, size, local_start = min(places)
    box = ", ".join(f"{a}:{a + extent}" for a, extent in zip(start, size, strict=True))
    return f"{tensor}[{box}] at {list(local_start)}"
