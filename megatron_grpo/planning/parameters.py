"""The parameters of a trainer rank, in the order of Megatron-Core's gradient buffers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

from checkpoint_convert import ModelShape, megatron_layout
from checkpoint_convert.families.decoder import MTP_LAYER
from checkpoint_convert.megatron import local_parameters
from megatron_grpo.config.config import Config
from megatron_grpo.planning.layer_kinds import kind_of_layers, layer_kinds, mtp_kind
from megatron_grpo.policy.lora_targets import planned_adapters
from megatron_grpo.policy.matrices import is_matrix
from parallel import Coordinates, ParallelDims, pipeline_layers

REGISTERED = ("input_layernorm.", "softmax_offset", "linear_proj.", "self_attention.")
"""Parts of names in the order in which Megatron-Core's modules register them: `linear_proj`, the
last projection of attention, comes before the first ones. Other names keep the order of
`megatron_layout`."""
OF_MTP = -1
"""Chunk number of the multi-token-prediction layer, which has buffers of its own."""
LINEAR = (".linear_", ".in_proj.", ".out_proj.")
"""Parts of the names of the weights of linear layers; routers and gates have others."""


class Parameter(NamedTuple):
    """A parameter of a rank."""

    name: str
    size: int
    """Number of elements."""
    is_matrix: bool = False
    """Whether Muon would update it."""
    largest: int = 0
    """Elements of the largest tensor of the weight files that it is cut from."""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to an expert: experts are replicated over other ranks."""
        return ".experts." in self.name

    @property
    def is_linear(self) -> bool:
        """Whether a linear layer multiplies by it."""
        return self.is_matrix and any(part in self.name for part in LINEAR)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A gradient buffer: parameters of a model chunk, in order, with the same replicas."""

    chunk: int
    is_expert: bool = False
    parameters: Sequence[Parameter]


def rank_buffers(shape: ModelShape, dims: ParallelDims, at: Coordinates) -> Iterator[Buffer]:
    """Gradient buffers of the rank at `at`.

    One layer of each kind and one expert per layer are laid out, and repeated for equal ones.
    """
    kinds = layer_kinds(shape)
    kind_of = kind_of_layers(kinds)
    chunks = pipeline_layers(shape.num_layers, dims)[at.pipeline]
    of_tensor = dims.tensor, dims.expert_tensor, at.tensor
    parts = [layer_parameters(kind.shape, *of_tensor) for kind in kinds]
    num_experts = local_experts(shape, dims)
    first, last = _ends(kinds[0].shape, *of_tensor, dims.pipeline > 1)
    for chunk, layers in enumerate(chunks):
        others, experts = [*first] if layers.start == 0 else [], []
        for layer in layers:
            of_layer, of_expert = parts[kind_of[layer]]
            others += of_layer
            experts += num_experts * [*of_expert]
        others += last if layers.stop == shape.num_layers else []
        yield Buffer(chunk=chunk, parameters=others)
        yield Buffer(chunk=chunk, is_expert=True, parameters=experts)
    if shape.trains_mtp and chunks[-1].stop == shape.num_layers:
        own, expert = _mtp_parameters(shape, *of_tensor)
        yield Buffer(chunk=OF_MTP, parameters=own)
        yield Buffer(chunk=OF_MTP, is_expert=True, parameters=num_experts * [*expert])


def local_experts(shape: ModelShape, dims: ParallelDims) -> int:
    """Experts of each mixture that a rank has a part of."""
    return shape.moe.num_experts // dims.expert if shape.moe else 0


def adapter_buffers(cfg: Config, shape: ModelShape, at: Coordinates) -> Iterator[Buffer]:
    """A and B of every linear layer of the rank at `at` that has adapters."""
    chunks = defaultdict(list)
    for name, size in planned_adapters(cfg.lora, shape, cfg.dims, at).layout.shapes.items():
        adapter = Parameter(name, prod(size), is_matrix(name, size))
        chunks[int(name.partition(".")[0])].append(adapter)
    for chunk, parameters in chunks.items():
        yield Buffer(chunk=chunk, parameters=parameters)


Parts = tuple[Sequence[Parameter], Sequence[Parameter]]
"""(parameters outside of experts, parameters of one expert)."""


@cache
def layer_parameters(shape: ModelShape, tensor: int, expert_tensor: int, rank: int = 0) -> Parts:
    """Parameters of tensor rank `rank` in a layer; `shape` has layers of one kind only."""
    chunk = _tiny_chunk(shape, tensor, expert_tensor, rank)
    layer = [each for each in chunk if ".layers." in each.name]
    return _experts_apart(sorted(layer, key=_registration))


@cache
def _ends(
    shape: ModelShape, tensor: int, expert_tensor: int, rank: int, has_stages: bool
) -> tuple[Sequence[Parameter], Sequence[Parameter]]:
    """(parameters before the first layer, after the last). With stages, a tied head is a parameter
    of the last one."""
    stages = 2 if has_stages else 1
    first, last = (
        _tiny_chunk(shape, tensor, expert_tensor, rank, stages, stage) for stage in (0, stages - 1)
    )
    before = next(i for i, each in enumerate(first) if ".layers." in each.name)
    after = next(i for i, each in enumerate(reversed(last)) if ".layers." in each.name)
    return first[:before], last[len(last) - after :]


@cache
def _mtp_parameters(shape: ModelShape, tensor: int, expert_tensor: int, rank: int) -> Parts:
    """Parameters of tensor rank `rank` in the multi-token-prediction layer."""
    drafting = replace(mtp_kind(shape).shape, trains_mtp=True)
    chunk = _tiny_chunk(drafting, tensor, expert_tensor, rank)
    own = [Parameter(each.name, each.size) for each in chunk if f".{MTP_LAYER}" in each.name]
    return _experts_apart(own)


def _tiny_chunk(
    shape: ModelShape, tensor: int, expert_tensor: int, rank: int, stages: int = 1, stage: int = 0
) -> Sequence[Parameter]:
    """Parameters of tensor rank `rank` in a stage of one layer."""
    # As many expert ranks as experts: each rank has one expert, which stands for all.
    num_experts = shape.moe.num_experts if shape.moe else 1
    dims = ParallelDims(
        tensor=tensor,
        data=num_experts * expert_tensor,
        pipeline=stages,
        expert=num_experts,
        expert_tensor=expert_tensor,
    )
    at = Coordinates(tensor=rank, context=0, data=0, pipeline=stage)
    tiny = replace(shape, num_layers=stages)
    # Transformer Engine names norms differently, but their sizes are equal.
    layout = megatron_layout(tiny, dims, at, transformer_engine=False)
    largest = dict.fromkeys(layout.shapes, 0)
    wholes = {
        source.name: prod(source.whole_shape)
        for _, parameter in local_parameters(tiny, dims, at, transformer_engine=False)
        for source in parameter.sources
    }
    for piece in layout.pieces:
        largest[piece.local] = max(largest[piece.local], wholes[piece.tensor])
    return [
        Parameter(name, prod(size), is_matrix(name, size), largest[name])
        for name, size in layout.shapes.items()
    ]


def _experts_apart(parameters: Sequence[Parameter]) -> Parts:
    others = [each for each in parameters if not each.is_expert]
    return others, [each for each in parameters if each.is_expert]


def _registration(parameter: Parameter) -> int:
    """Sort key of a layer's parameter: its index in `REGISTERED`, or behind it."""
    places = (i for i, part in enumerate(REGISTERED) if part in parameter.name)
    return next(places, len(REGISTERED))
