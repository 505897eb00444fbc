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

_REGISTERED = ("input_layernorm.", "softmax_offset", "linear_proj.", "self_attention.")
"""Parts of names in a layer, in order; the rest is in the order of `megatron_layout`."""
OF_MTP = -1
"""In place of the chunk, of the layer for multi-token prediction, which has buffers of its own."""


class Parameter(NamedTuple):
    """One of a rank's."""

    name: str
    size: int
    """Number of elements."""
    is_matrix: bool = False
    """Whether Muon would update it."""
    largest: int = 0
    """Elements of the largest tensor of the weight files of which it has a part."""

    @property
    def is_expert(self) -> bool:
        """Whether other ranks replicate it than the rest."""
        return ".experts." in self.name


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Parameters of a model chunk, in its order, that the same ranks replicate."""

    chunk: int
    is_expert: bool = False
    parameters: Sequence[Parameter]


class _Shallow(NamedTuple):
    """Parameters of a rank in a chunk with one layer and one expert."""

    before: Sequence[Parameter]
    layer: Sequence[Parameter]
    expert: Sequence[Parameter]
    after: Sequence[Parameter]


def rank_buffers(shape: ModelShape, dims: ParallelDims, at: Coordinates) -> Iterator[Buffer]:
    """The parameters of the rank at `at`.

    Layers of a kind are alike, and so are experts of a layer: one of them is counted.
    """
    kinds = layer_kinds(shape)
    kind_of = kind_of_layers(kinds)
    chunks = pipeline_layers(shape.num_layers, dims)[at.pipeline]
    of_tensor = dims.tensor, dims.expert_tensor, at.tensor
    num_experts = shape.moe.num_experts // dims.expert if shape.moe else 0
    for chunk, layers in enumerate(chunks):
        ends = layers.start == 0, layers.stop == shape.num_layers
        shallow = [_shallow_chunk(kind.shape, *of_tensor, *ends) for kind in kinds]
        others, experts = [*shallow[0].before], []  # the same of all kinds
        for layer in layers:
            kind = shallow[kind_of[layer]]
            others += kind.layer
            experts += num_experts * [*kind.expert]
        others += shallow[0].after
        yield Buffer(chunk=chunk, parameters=others)
        yield Buffer(chunk=chunk, is_expert=True, parameters=experts)
    if shape.trains_mtp and chunks[-1].stop == shape.num_layers:
        own, expert = _mtp_layer(shape, *of_tensor)
        yield Buffer(chunk=OF_MTP, parameters=own)
        yield Buffer(chunk=OF_MTP, is_expert=True, parameters=num_experts * [*expert])


def adapter_buffers(cfg: Config, shape: ModelShape, at: Coordinates) -> Iterator[Buffer]:
    """A and B of every linear layer of the rank at `at` that has adapters."""
    chunks = defaultdict(list)
    for name, size in planned_adapters(cfg.lora, shape, cfg.dims, at).layout.shapes.items():
        adapter = Parameter(name, prod(size), is_matrix(name, size))
        chunks[int(name.partition(".")[0])].append(adapter)
    for chunk, parameters in chunks.items():
        yield Buffer(chunk=chunk, parameters=parameters)


def parameters_of_layer(shape: ModelShape, tensor: int, expert_tensor: int) -> Sequence[Parameter]:
    """Parameters of a tensor rank in a layer and one of its experts; all layers are of one kind."""
    chunk = _shallow_chunk(shape, tensor, expert_tensor, 0, False, False)
    return [*chunk.layer, *chunk.expert]


@cache
def _shallow_chunk(
    shape: ModelShape, tensor: int, expert_tensor: int, rank: int, is_first: bool, is_last: bool
) -> _Shallow:
    """Parameters of tensor rank `rank` in a chunk; all layers of `shape` are of one kind.

    `is_first`, `is_last`: whether the chunk has the first layer of the model, and its last.
    """
    dims = _with_one_expert(shape, tensor, expert_tensor, 1 if is_first and is_last else 2)
    at = Coordinates(tensor=rank, context=0, data=0, pipeline=0 if is_first else 1)
    shallow = replace(shape, num_layers=dims.pipeline)
    # Transformer Engine names norms differently, but they have as many elements.
    layout = megatron_layout(shallow, dims, at, transformer_engine=False)
    largest = dict.fromkeys(layout.shapes, 0)
    wholes = {
        source.name: prod(source.whole_shape)
        for _, parameter in local_parameters(shallow, dims, at, transformer_engine=False)
        for source in parameter.sources
    }
    for piece in layout.pieces:
        largest[piece.local] = max(largest[piece.local], wholes[piece.tensor])
    own = [
        Parameter(name, prod(size), is_matrix(name, size), largest[name])
        for name, size in layout.shapes.items()
    ]
    in_layer = [".layers." in each.name for each in own]
    begin = in_layer.index(True)
    end = begin + sum(in_layer)
    layer = sorted(own[begin:end], key=_registration)
    return _Shallow(
        own[:begin] if is_first else [], *_experts_apart(layer), own[end:] if is_last else []
    )


@cache
def _mtp_layer(
    shape: ModelShape, tensor: int, expert_tensor: int, rank: int
) -> tuple[Sequence[Parameter], Sequence[Parameter]]:
    """Parameters of tensor rank `rank` in the multi-token-prediction layer, and in an expert."""
    dims = _with_one_expert(shape, tensor, expert_tensor, 1)
    at = Coordinates(tensor=rank, context=0, data=0, pipeline=0)
    shallow = replace(mtp_kind(shape), num_layers=1, trains_mtp=True)
    layout = megatron_layout(shallow, dims, at, transformer_engine=False)
    return _experts_apart(
        [
            Parameter(name, prod(size))
            for name, size in layout.shapes.items()
            if f".{MTP_LAYER}" in name
        ]
    )


def _with_one_expert(
    shape: ModelShape, tensor: int, expert_tensor: int, pipeline: int
) -> ParallelDims:
    """A mesh whose ranks have one expert of each layer."""
    num_experts = shape.moe.num_experts if shape.moe else 1
    return ParallelDims(
        tensor=tensor,
        data=num_experts * expert_tensor,
        pipeline=pipeline,
        expert=num_experts,
        expert_tensor=expert_tensor,
    )


def _experts_apart(
    parameters: Sequence[Parameter],
) -> tuple[Sequence[Parameter], Sequence[Parameter]]:
    """Split into parameters outside of experts and those of experts."""
    others = [each for each in parameters if not each.is_expert]
    return others, [each for each in parameters if each.is_expert]


def _registration(parameter: Parameter) -> int:
    """Sorts the parameters of a layer as Megatron-Core's modules register them: what follows the
    scores of attention comes before the projections that they are computed of."""
    places = (i for i, part in enumerate(_REGISTERED) if part in parameter.name)
    return next(places, len(_REGISTERED))
