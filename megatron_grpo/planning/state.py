"""Exact bytes that a trainer rank always holds: weights, gradients and optimizer state.

Only `HostOptimizer` is an upper bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, lcm

import numpy as np

from checkpoint_convert import ModelShape
from checkpoint_convert.families.ffn import EXPERT_BIAS
from checkpoint_convert.families.mla import INDEXER, KEY_NORM
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import Part
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.layer_kinds import kind_of_layers, layer_kinds
from megatron_grpo.planning.optimizers import OwnedMatrix, planned_optimizer
from megatron_grpo.planning.parameters import (
    OF_MTP,
    Buffer,
    Parameter,
    adapter_buffers,
    rank_buffers,
)
from megatron_grpo.policy.matrices import EMBEDDINGS
from parallel import Coordinates, ParallelDims, pipeline_layers
from parallel.alignment import round_up

START_MULTIPLE, BUCKET_MULTIPLE = 64, 128
"""Elements to which Megatron-Core aligns parameters and buckets in its gradient buffers."""
BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000
"""Elements at which Megatron-Core's DistributedDataParallel closes a bucket: the first, or the
second times the data ranks, whichever is more."""
ROUTER_WEIGHT = ".router.weight"
"""Suffix of the weights that `model.freeze_moe_router` freezes."""
FLOAT32 = (EXPERT_BIAS, *KEY_NORM)
"""Suffixes of parameters that are float32 in a model of any dtype, and never trained."""
FLOAT = ITEMSIZE["float32"]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank always holds."""

    weights: int
    frozen: int
    """Part of `weights` that is frozen, under adapters."""
    expert_weights: int
    """Trained weights of experts, which have their replicas on other ranks."""
    gradients: int
    optimizer: int
    """The rank's shard of moments and of float32 master weights, and gradients that it keeps."""
    reference: int
    """Weights of the reference model if `grpo.beta` > 0; with `grpo.sync_ref_model` also a float32
    copy, if `model.dtype` would round the weights. With adapters: one copy of the adapters for
    `sync_ref_model`, else nothing."""
    update: int
    """Additional bytes while weights are updated."""
    host: int
    """Optimizer state in host memory; not in `total`."""
    exchanged: int
    """Bytes that the rank sends, or receives, for an update, besides gradients and weights."""

    @property
    def trained(self) -> int:
        """Bytes of the weights that are trained."""
        return self.weights - self.frozen

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference


def gradient_itemsize(cfg: Config) -> int:
    """Bytes in which an element of a gradient is summed."""
    return ITEMSIZE["float32" if cfg.optimizer.grad_reduce_in_fp32 else cfg.model.dtype]


def _reference_itemsize(cfg: Config) -> int:
    """Bytes of the reference model per trained weight."""
    mixture = FLOAT if cfg.mixes_in_float32 else 0
    if cfg.grpo.beta == 0 or (cfg.lora.r and not cfg.grpo.sync_ref_model):
        return 0
    if cfg.lora.r and mixture:
        return mixture  # rounded whenever the reference computes
    return ITEMSIZE[cfg.model.dtype] + mixture


def part_bytes(state: StateBytes, parts: Sequence[Part]) -> int:
    """Bytes of some parts of a rank's state."""
    return sum(getattr(state, part) for part in parts)


def state_bytes(cfg: Config, shape: ModelShape, rank: int) -> StateBytes:
    """State of a rank from the first step to the last."""
    weights = frozen = expert_weights = gradients = 0
    at = cfg.dims.coordinates(rank)
    buffers = list(rank_buffers(shape, cfg.dims, at))
    biases, buffers = _split_off(buffers, lambda each: each.name.endswith(FLOAT32))
    if cfg.lora.r:
        frozen = sum(each.size for buffer in buffers for each in buffer.parameters)
        buffers = list(adapter_buffers(cfg, shape, at))
    else:  # weights without gradients and moments
        router = (ROUTER_WEIGHT,) if cfg.model.freeze_moe_router else ()
        weights, buffers = _split_off(
            buffers, lambda each: INDEXER in each.name or each.name.endswith(router)
        )
    buckets = list(_buckets(buffers, shape, cfg, at))
    for bucket in buckets:
        weights += bucket.size
        expert_weights += bucket.size if bucket.is_expert else 0
        gradients += bucket.padded
    itemsize, of_biases = ITEMSIZE[cfg.model.dtype], biases * FLOAT
    owned = [
        [size for bucket in buckets if bucket.is_expert == is_expert for size in bucket.owned]
        for is_expert in (False, True)
    ]
    matrices = [each for bucket in buckets for each in bucket.owned_matrices]
    has_reference = cfg.grpo.beta > 0 and not cfg.lora.r  # adapters and reference share the base
    reference = weights * _reference_itemsize(cfg) + (of_biases if has_reference else 0)
    if shape.trains_mtp:  # the reference has no layer for multi-token prediction
        reference = state_bytes(cfg, replace(shape, trains_mtp=False), rank).reference
    return StateBytes(
        weights=(weights + frozen) * itemsize + of_biases,
        frozen=frozen * itemsize + of_biases if cfg.lora.r else 0,
        expert_weights=expert_weights * itemsize,
        gradients=gradients * gradient_itemsize(cfg),
        reference=reference,
        **planned_optimizer(cfg).state_bytes(owned, matrices)._asdict(),
    )


def stage_states(cfg: Config, shape: ModelShape) -> Iterator[StateBytes]:
    """`state_bytes` of the first rank of every stage; the others differ at most by some padding.

    Stages with layers of the same kinds in the same order are alike, except for the first and the
    last.
    """
    kind_of = kind_of_layers(layer_kinds(shape))
    known: dict[tuple[object, ...], StateBytes] = {}
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, cfg.dims)):
        ends = int(chunks[0].start == 0), int(chunks[-1].stop == shape.num_layers)
        role = *ends, *(tuple(kind_of[layer] for layer in chunk) for chunk in chunks)
        if role not in known:
            known[role] = state_bytes(cfg, shape, stage * cfg.dims.stage_size)
        yield known[role]


def _split_off(
    buffers: Iterable[Buffer], is_meant: Callable[[Parameter], bool]
) -> tuple[int, list[Buffer]]:
    """(elements of the parameters with `is_meant`, buffers without them); experts' buffers stay."""
    size, others = 0, []
    for buffer in buffers:
        if not buffer.is_expert:
            size += sum(each.size for each in buffer.parameters if is_meant(each))
            rest = [each for each in buffer.parameters if not is_meant(each)]
            buffer = replace(buffer, parameters=rest)
        others.append(buffer)
    return size, others


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients are reduced together; each replica's rank updates one shard."""

    is_expert: bool
    parameters: Sequence[Parameter]
    """In bucket order."""
    num_splits: int
    """Tensor ranks over which matrices are split."""
    num_shards: int
    shard: int
    """Index of this rank's shard."""

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([each.size for each in self.parameters])

    @cached_property
    def _starts(self) -> np.ndarray:
        padded = -(-self._sizes // START_MULTIPLE) * START_MULTIPLE
        return np.cumsum(padded) - padded

    @property
    def size(self) -> int:
        """Elements without padding."""
        return int(self._sizes.sum())

    @property
    def padded(self) -> int:
        """Elements including all padding."""
        end = int(self._starts[-1] + self._sizes[-1])
        # As `pad_bucket_end` of Megatron-Core's param_layout.py: equal shards.
        return round_up(end, lcm(self.num_shards, BUCKET_MULTIPLE))

    @property
    def owned_matrices(self) -> list[OwnedMatrix]:
        """Matrices of this rank's shard."""
        return [
            OwnedMatrix(size, each.largest, self.num_splits)
            for each, size in zip(self.parameters, self.owned, strict=True)
            if each.is_matrix
        ]

    @cached_property
    def owned(self) -> list[int]:
        """Elements of each parameter in this rank's shard."""
        size = self.padded // self.num_shards
        first, last = self.shard * size, (self.shard + 1) * size
        ends = self._starts + self._sizes
        # Overlap of [start, end) with the shard; negative where they do not meet.
        owned = np.minimum(ends, last) - np.maximum(self._starts, first)
        return np.maximum(owned, 0).tolist()


def _buckets(
    buffers: Iterable[Buffer], shape: ModelShape, cfg: Config, at: Coordinates
) -> Iterator[_Bucket]:
    """Buckets of a rank; experts have buckets of their own."""
    dims = cfg.dims
    is_tied_over_stages = shape.tie_word_embeddings and dims.pipeline > 1
    most: float = bucket_elements(dims)
    # As in Megatron-Core: traffic of later stages is not on the critical path.
    if not cfg.parallel.overlap_grad_reduce or at.pipeline > 0:
        most = inf
    for buffer in buffers:
        if buffer.is_expert:
            num_shards, shard = expert_shards(dims), dims.expert_place(at).data
        else:
            num_shards, shard = dims.data * dims.context, at.context + dims.context * at.data
        at_most = inf if buffer.chunk == OF_MTP else most
        has_tied = is_tied_over_stages and not buffer.is_expert
        # Megatron-Core fills buffers from the last parameter, in the order of the backward.
        for bucket in _divided(buffer.parameters[::-1], at_most, has_tied):
            yield _Bucket(
                is_expert=buffer.is_expert,
                parameters=bucket,
                num_splits=dims.expert_tensor if buffer.is_expert else dims.tensor,
                num_shards=num_shards,
                shard=shard,
            )


def _divided(
    buffer: Sequence[Parameter], most: float, has_tied: bool
) -> Iterator[Sequence[Parameter]]:
    """Parameters of each bucket of a buffer: a bucket is closed at `most` elements.

    `has_tied`: embeddings tied across stages have a bucket of their own.
    """
    if most == inf and not has_tied:  # a short cut for tens of thousands of experts
        yield from [buffer] if buffer else []
        return
    bucket: list[Parameter] = []
    end = 0
    for each in buffer:
        is_tied = has_tied and each.name.endswith(EMBEDDINGS)
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
    """Elements at which a bucket is closed if its traffic overlaps with computation."""
    return max(BUCKET_SIZE, BUCKET_SIZE_PER_RANK * dims.data)


def expert_shards(dims: ParallelDims) -> int:
    """Number of ranks that hold copies of the same experts and share their optimizer state."""
    return dims.stage_size // (dims.expert * dims.expert_tensor)
