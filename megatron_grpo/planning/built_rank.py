"""Builds one rank of a job with Megatron-Core on torch's meta device, and checks its layout."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_convert import ModelShape
from checkpoint_convert.megatron import float32_tensors
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
    """A rank and the memory that its modules, buffers and optimizer would take."""

    sender: Sender
    """What it holds and can send, with the layout that its modules were compared with."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    faults: tuple[str, ...]
    """How the modules differ from the plan."""


def build_rank(cfg: Config, shape: ModelShape, rank: int, saved: Layout) -> BuiltRank:
    """Build the modules, gradient buffers and optimizer of a rank without allocating memory.

    `saved` is the `checkpoint_layout` of the model. `setup_device` must have been called.
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
    """Bytes of all gradient buffers, including padding."""
    return sum(
        buffer.grad_data.nbytes
        for chunk in policy.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    )


def optimizer_bytes(policy: Policy) -> int:
    """Bytes of this rank's share of master weights and moments.

    Moments count even though some optimizers create them only at the first step. Float32 weights
    are their own master weights, which therefore do not count.
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
    """How the modules of a rank differ from its layout.

    Compares names, shapes and dtypes; if they agree, also which elements of the model each
    parameter holds, which Megatron-Core gives in the coordinates of a checkpoint (`saved`).
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
    float32 = float32_tensors(model.shape)
    source = {piece.local: piece.tensor for piece in model.layout.pieces}
    planned: dict[str, Any] = {
        name: (size, torch.float32 if source[name] in float32 else dtype)
        for name, size in model.layout.shapes.items()
    }
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
"""A tensor of the model, start and size of a box in it, and the start of that box locally."""


def _places(pieces: Iterable[Piece]) -> dict[str, set[Place]]:
    """For each local tensor, which of its boxes is which box of the model's tensors."""
    places: dict[str, set[Place]] = {}
    for piece in pieces:
        # Stacked tensors of a checkpoint have leading dimensions that the parameter lacks.
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
