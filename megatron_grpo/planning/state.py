"""Bytes that a trainer rank always holds: weights, gradients and optimizer state. Exact.

An optimizer that is partly on the host is the exception: see `optimizer_bytes.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm, prod
from typing import NamedTuple

from checkpoint_convert import ModelShape, hf_tensors, megatron_layout
from checkpoint_convert.families.decoder import MTP_LAYER
from checkpoint_convert.families.ffn import EXPERT_BIAS
from checkpoint_convert.families.mla import INDEXER, KEY_NORM
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Part
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.layer_kinds import LayerKind, layer_kinds, mtp_kind
from megatron_grpo.planning.optimizer_bytes import OwnedMatrix, shard_bytes
from megatron_grpo.policy.lora_targets import planned_adapters
from megatron_grpo.policy.matrices import EMBEDDINGS, is_matrix
from parallel import Coordinates, ParallelDims, Shape, pipeline_layers
from parallel.alignment import round_up

START_MULTIPLE, BUCKET_MULTIPLE = 64, 128
"""Elements to which Megatron-Core aligns parameters and buckets in its gradient buffers."""
BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000
"""Elements with which Megatron-Core closes a bucket where sums of gradients overlap with the
backward: the first, or the second for each data rank, if that is more."""
ROUTER_WEIGHT = ".router.weight"
"""Suffix of what `model.freeze_moe_router` keeps from being trained."""
FLOAT32 = (EXPERT_BIAS, *KEY_NORM)
"""Suffixes of what is float32 in a model of any dtype, and is never trained."""

_REGISTERED = ("input_layernorm.", "softmax_offset", "linear_proj.", "self_attention.")
"""Parts of names in a layer, in order; the rest is in the order of `megatron_layout`."""
OF_MTP = -1
"""In place of the chunk, of the layer for multi-token prediction, which has buffers of its own."""


class _Parameter(NamedTuple):
    """One of a rank's."""

    chunk: int
    name: str
    shape: Shape
    largest: int = 0
    """Elements of the largest tensor of the weight files of which it has a part."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether other ranks replicate it than the rest."""
        return ".experts." in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether Muon would update it."""
        return self.chunk != OF_MTP and is_matrix(self.name, self.shape)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank always holds."""

    weights: int
    frozen: int
    """Part of `weights` that is not trained, if adapters are."""
    expert_weights: int
    """Part of the others that belongs to experts, which other ranks replicate than the rest."""
    gradients: int
    optimizer: int
    """The rank's shard of moments and of float32 master weights (none if weights are float32)."""
    reference: int
    """Weights of the reference model if `grpo.beta` > 0, and their float32 copy that
    `grpo.sync_ref_model` needs if `model.dtype` would round them. Of adapters, that copy or else
    another is all, and without `sync_ref_model` there is nothing."""
    update: int
    """In addition while weights are updated: float32 copies, or whole matrices for Muon."""
    host: int
    """What the optimizer keeps in host memory; no part of the sum."""
    exchanged: int
    """What the rank sends of matrices, or receives, while Muon updates them."""

    @property
    def trained(self) -> int:
        """Bytes of the weights that are trained."""
        return self.weights - self.frozen

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.reference


def gradient_itemsize(cfg: Config) -> int:
    """Bytes in which an element of a gradient is summed."""
    return ITEMSIZE["float32" if cfg.optimizer.grad_reduce_in_fp32 else cfg.model.dtype]


def _reference_itemsize(cfg: Config) -> int:
    """Bytes that the reference has of each trained weight."""
    mixture = ITEMSIZE["float32"] if cfg.mixes_in_float32 else 0
    if cfg.grpo.beta == 0 or (cfg.lora.r and not cfg.grpo.sync_ref_model):
        return 0
    if cfg.lora.r and mixture:
        return mixture  # rounded whenever the reference computes
    return ITEMSIZE[cfg.model.dtype] + mixture


def part_bytes(state: StateBytes, parts: Sequence[Part]) -> int:
    """Bytes of some parts of what a rank holds."""
    return sum(getattr(state, part) for part in parts)


def state_bytes(cfg: Config, shape: ModelShape, rank: int) -> StateBytes:
    """What a rank holds from the first step to the last."""
    weights = frozen = expert_weights = gradients = 0
    at = cfg.dims.coordinates(rank)
    parameters = list(_parameters(shape, cfg.dims, at))
    biases = sum(each.size for each in parameters if each.name.endswith(FLOAT32))
    parameters = [each for each in parameters if not each.name.endswith(FLOAT32)]
    if cfg.lora.r:
        frozen = sum(each.size for each in parameters)
        parameters = list(_adapters(cfg, shape, at))
    else:  # weights without gradients and moments
        router = (ROUTER_WEIGHT,) if cfg.model.freeze_moe_router else ()
        kept = [each for each in parameters if INDEXER in each.name or each.name.endswith(router)]
        weights = sum(each.size for each in kept)
        parameters = [each for each in parameters if each not in kept]
    buckets = list(_buckets(parameters, shape, cfg, at))
    for bucket in buckets:
        size = sum(each.size for each in bucket.parameters)
        weights += size
        expert_weights += size if bucket.is_expert else 0
        gradients += bucket.padded
    itemsize, of_biases = ITEMSIZE[cfg.model.dtype], biases * ITEMSIZE["float32"]
    owned = [
        [size for bucket in buckets if bucket.is_expert == is_expert for size in bucket.owned]
        for is_expert in (False, True)
    ]
    is_muon = cfg.optimizer.optimizer == "muon"
    matrices = [each for bucket in buckets for each in bucket.owned_matrices] if is_muon else []
    shard = shard_bytes(cfg, owned, matrices)
    has_reference = cfg.grpo.beta > 0 and not cfg.lora.r  # that of adapters has their base
    reference = weights * _reference_itemsize(cfg) + (of_biases if has_reference else 0)
    if shape.trains_mtp:  # not by the reference
        reference = state_bytes(cfg, replace(shape, trains_mtp=False), rank).reference
    return StateBytes(
        weights=(weights + frozen) * itemsize + of_biases,
        frozen=frozen * itemsize + of_biases if cfg.lora.r else 0,
        expert_weights=expert_weights * itemsize,
        gradients=gradients * gradient_itemsize(cfg),
        optimizer=shard.device,
        reference=reference,
        update=shard.update,
        host=shard.host,
        exchanged=shard.exchanged,
    )


def stage_states(cfg: Config, shape: ModelShape) -> list[StateBytes]:
    """`state_bytes` of the first rank of every stage; the others differ at most by some padding.

    Stages with layers of the same kinds in the same order are alike, except for the first and the
    last.
    """
    kind_of = _kind_of_layers(layer_kinds(shape))
    known: dict[tuple[object, ...], StateBytes] = {}
    states = []
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, cfg.dims)):
        ends = int(chunks[0].start == 0), int(chunks[-1].stop == shape.num_layers)
        role = *ends, *(tuple(kind_of[layer] for layer in chunk) for chunk in chunks)
        if role not in known:
            known[role] = state_bytes(cfg, shape, stage * cfg.dims.stage_size)
        states.append(known[role])
    return states


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients are reduced together; each replica's rank updates one shard."""

    is_expert: bool
    parameters: Sequence[_Parameter]
    """In bucket order."""
    num_splits: int
    """Tensor ranks over which matrices are split."""
    num_shards: int
    shard: int
    """Index of this rank's shard."""

    @property
    def _places(self) -> list[tuple[int, int]]:
        places, end = [], 0
        for parameter in self.parameters:
            start = round_up(end, START_MULTIPLE)
            end = start + parameter.size
            places.append((start, end))
        return places

    @property
    def padded(self) -> int:
        """Elements including all padding."""
        return round_up(self._places[-1][1], lcm(self.num_shards, BUCKET_MULTIPLE))

    @property
    def owned_matrices(self) -> list[OwnedMatrix]:
        """What Muon would update in this rank's shard."""
        return [
            OwnedMatrix(size, each.largest, self.num_splits)
            for each, size in zip(self.parameters, self.owned, strict=True)
            if each.is_matrix
        ]

    @property
    def owned(self) -> list[int]:
        """Elements of each parameter in this rank's shard."""
        size = self.padded // self.num_shards
        first, last = self.shard * size, (self.shard + 1) * size
        return [max(0, min(end, last) - max(start, first)) for start, end in self._places]


def _buckets(
    parameters: Sequence[_Parameter], shape: ModelShape, cfg: Config, at: Coordinates
) -> Iterator[_Bucket]:
    """The buckets of a rank. Experts have separate ones; later stages do not divide theirs."""
    dims = cfg.dims
    is_tied_over_stages = shape.tie_word_embeddings and dims.pipeline > 1
    most: float = bucket_elements(dims)
    if not cfg.parallel.overlap_grad_reduce or at.pipeline > 0:
        most = inf
    buffers: dict[tuple[int, bool], list[_Parameter]] = {}
    for each in parameters:
        buffers.setdefault((each.chunk, each.is_expert), []).append(each)
    for (chunk, is_expert), buffer in buffers.items():
        if is_expert:
            num_shards, shard = expert_shards(dims), dims.expert_place(at).data
        else:
            num_shards, shard = dims.data * dims.context, at.context + dims.context * at.data
        at_most = inf if chunk == OF_MTP else most
        for bucket in _divided(reversed(buffer), at_most, is_tied_over_stages):
            yield _Bucket(
                is_expert=is_expert,
                parameters=bucket,
                num_splits=dims.expert_tensor if is_expert else dims.tensor,
                num_shards=num_shards,
                shard=shard,
            )


def _divided(
    buffer: Iterable[_Parameter], most: float, is_tied_over_stages: bool
) -> Iterator[list[_Parameter]]:
    """The parameters of each bucket of a buffer: one is closed at `most` elements.

    A parameter that is tied across stages has a bucket of its own.
    """
    bucket: list[_Parameter] = []
    end = 0
    for each in buffer:
        is_tied = is_tied_over_stages and each.name.endswith(EMBEDDINGS)
        if is_tied and bucket:
            yield bucket
            bucket, end = [], 0
        bucket.append(each)
        end = round_up(end, START_MULTIPLE) + each.size
        if is_tied or end >= most:
            yield bucket
            bucket, end = [], 0
    if bucket:
        yield bucket


def bucket_elements(dims: ParallelDims) -> int:
    """Elements with which a bucket is closed where traffic overlaps with computation."""
    return max(BUCKET_SIZE, BUCKET_SIZE_PER_RANK * dims.data)


def expert_shards(dims: ParallelDims) -> int:
    """Number of ranks that hold copies of the same experts and share their optimizer state."""
    return dims.stage_size // (dims.expert * dims.expert_tensor)


def _parameters(shape: ModelShape, dims: ParallelDims, at: Coordinates) -> Iterator[_Parameter]:
    """The parameters of the rank at `at`, in model order.

    Layers of a kind are alike, so each is that of a model with one layer of its kind per chunk.
    """
    kinds = layer_kinds(shape)
    kind_of = _kind_of_layers(kinds)
    chunks = pipeline_layers(shape.num_layers, dims)[at.pipeline]
    shallow = [_shallow_chunks(kind.shape, dims, at) for kind in kinds]
    for layers, *of_kinds in zip(chunks, *shallow, strict=True):
        before, _, after = of_kinds[0]  # the same of all kinds
        yield from before
        for layer in layers:
            _, own, _ = of_kinds[kind_of[layer]]
            yield from own
        yield from after
    if shape.trains_mtp and chunks[-1].stop == shape.num_layers:
        yield from _of_mtp(shape, dims, at)


def _of_mtp(shape: ModelShape, dims: ParallelDims, at: Coordinates) -> Iterator[_Parameter]:
    """The parameters of the layer for multi-token prediction of a rank of the last stage."""
    num_chunks = dims.pipeline * dims.virtual_pipeline
    shallow = replace(mtp_kind(shape), num_layers=num_chunks, trains_mtp=True)
    layout = megatron_layout(shallow, dims.even, at, transformer_engine=False)
    for name, size in layout.shapes.items():
        if f".{MTP_LAYER}" in name:
            yield _Parameter(OF_MTP, name, size)


def _kind_of_layers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """The index of each layer's kind."""
    return {layer: index for index, kind in enumerate(kinds) for layer in kind.layers}


def _adapters(cfg: Config, shape: ModelShape, at: Coordinates) -> Iterator[_Parameter]:
    """A and B of every linear layer of the rank at `at` that has adapters."""
    for name, size in planned_adapters(cfg.lora, shape, cfg.dims, at).layout.shapes.items():
        yield _Parameter(int(name.partition(".")[0]), name, size)


def _shallow_chunks(
    shape: ModelShape, dims: ParallelDims, at: Coordinates
) -> Iterator[tuple[Sequence[_Parameter], Sequence[_Parameter], Sequence[_Parameter]]]:
    """What each chunk would hold before, in and after its layer if it had only one."""
    shallow = replace(shape, num_layers=dims.pipeline * dims.virtual_pipeline)
    # Transformer Engine names norms differently, but they have as many elements.
    layout = megatron_layout(shallow, dims.even, at, transformer_engine=False)
    of_files, largest = hf_tensors(shallow), dict.fromkeys(layout.shapes, 0)
    for piece in layout.pieces:
        largest[piece.local] = max(largest[piece.local], prod(of_files[piece.tensor]))
    for chunk in range(dims.virtual_pipeline):
        own = [
            _Parameter(chunk, name, size, largest[name])
            for name, size in layout.shapes.items()
            if name.startswith(f"{chunk}.")
        ]
        in_layer = [".layers." in each.name for each in own]
        begin = in_layer.index(True)
        end = begin + sum(in_layer)
        yield own[:begin], sorted(own[begin:end], key=_registration), own[end:]


def _registration(parameter: _Parameter) -> int:
    """Sorts the parameters of a layer as Megatron-Core's modules register them: what follows the
    scores of attention comes before the projections that they are computed of."""
    places = (i for i, part in enumerate(_REGISTERED) if part in parameter.name)
    return next(places, len(_REGISTERED))
