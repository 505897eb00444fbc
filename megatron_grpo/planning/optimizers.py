"""Optimizers: bytes of their state, their operations, and what ranks send for an update.

`planned_optimizer` chooses one by the keys of `optimizer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple

from checkpoint_convert import ModelShape, hf_tensors
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.layer_kinds import layer_kinds, mtp_kind
from megatron_grpo.policy.matrices import MAX_EXCHANGED, is_matrix, newton_schulz_flops
from parallel import ParallelDims, pipeline_layers

FLOAT = ITEMSIZE["float32"]
REST_BYTES = 2
"""Bytes of a float32 master weight beside its bfloat16 weight, in the precision-aware optimizer."""
HOST_COPIES = 3
"""Master weight and two moments, float32, of what is on the host. It also has its gradients."""


class OwnedMatrix(NamedTuple):
    """A matrix of the weight files, or some fused ones, of which a rank owns a range."""

    owned: int
    """Elements of the range."""
    whole: int
    """Elements of the largest matrix of the weight files of which it has a part."""
    num_splits: int
    """Tensor ranks over which it is split."""


class OptimizerBytes(NamedTuple):
    """Bytes that an optimizer takes of one rank, by names of `StateBytes`."""

    optimizer: int
    """Its shard of moments and master weights, and gradients that it keeps."""
    update: int = 0
    """In addition during an update."""
    host: int = 0
    """In host memory."""
    exchanged: int = 0
    """Bytes that the rank sends, or receives, during an update."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """State of as many bytes for every element: AdamW in all dtypes of master weights and
    moments."""

    master_itemsize: int
    """Bytes of a master weight, beside the weight itself."""
    moments_itemsize: int
    """Bytes of all moments."""
    copied_itemsize: int
    """Bytes that an update copies."""

    def state_bytes(
        self, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
    ) -> OptimizerBytes:
        """Bytes for the elements of each parameter that a rank owns, of experts apart from others;
        some are of `matrices`."""
        owned = sum(map(sum, shards))
        return OptimizerBytes(
            optimizer=owned * (self.master_itemsize + self.moments_itemsize),
            update=owned * self.copied_itemsize,
        )

    def flops(self, shape: ModelShape, dims: ParallelDims) -> tuple[float, float]:
        """Operations of an update: of all ranks, and of the rank with the most. Some for each
        weight do not count."""
        return 0.0, 0.0

    def group_size(self, dims: ParallelDims) -> int:
        """Ranks of a group of its own in which a rank communicates."""
        return 1


@dataclass(frozen=True, kw_only=True)
class HostOptimizer(Optimizer):
    """A fraction of the state on the host: `optimizer_cpu_offload`. No exact figures.

    Megatron-Core takes parameters in its order until they are that fraction or more. On either side
    it is then at most this, and less by one parameter.
    """

    fraction: float

    def state_bytes(
        self, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
    ) -> OptimizerBytes:
        on_gpu = host = 0
        for sizes in (shard for shard in shards if sum(shard)):
            moved = ceil(self.fraction * sum(sizes))
            on_gpu += sum(sizes) - moved
            most = min(sum(sizes), moved + max(sizes))
            pinned = sum(page_locked(size * FLOAT) for size in sizes)
            host += most * HOST_COPIES * FLOAT + min(pinned, 2 * most * FLOAT)
        itemsize = self.master_itemsize + self.moments_itemsize + self.copied_itemsize
        return OptimizerBytes(optimizer=on_gpu * itemsize, host=host)


def page_locked(num_bytes: int) -> int:
    """Size that torch takes for a page-locked tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """One moment of matrices; one rank of a stage computes the update of each, and has its parts
    sent (`WholeMatrices`)."""

    def state_bytes(
        self, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
    ) -> OptimizerBytes:
        """During an update, the parts that a rank sends and receives at a time, and a matrix: in
        float32 as it comes, normalized and as it goes, and twice in bfloat16."""
        adam, owned = super().state_bytes(shards, matrices), sum(each.owned for each in matrices)
        largest = max((each.whole for each in matrices), default=0)
        most = max(largest, min(MAX_EXCHANGED, owned))
        of_matrix = 3 * FLOAT + 2 * ITEMSIZE["bfloat16"]
        # Who computes a matrix has a part of it: ranks send what others compute.
        sent = sum(each.owned - each.owned // each.num_splits for each in matrices)
        return OptimizerBytes(
            optimizer=adam.optimizer - owned * FLOAT,
            update=adam.update + 2 * FLOAT * most + of_matrix * largest,
            exchanged=FLOAT * sent,
        )

    def flops(self, shape: ModelShape, dims: ParallelDims) -> tuple[float, float]:
        """Newton-Schulz steps of each matrix, as if the ranks of a stage shared them evenly."""
        kinds = [(kind, _matrix_flops(kind.one_layer)) for kind in layer_kinds(shape)]
        stages = [
            float(sum(kind.count_in(*chunks) * sum(flops) for kind, flops in kinds))
            for chunks in pipeline_layers(shape.num_layers, dims)
        ]
        largest = max(max(flops) for _, flops in kinds)
        if shape.trains_mtp:
            joins = newton_schulz_flops((shape.hidden_size, 2 * shape.hidden_size))
            of_mtp = [joins, *_matrix_flops(mtp_kind(shape).one_layer)]
            stages[-1] += sum(of_mtp)
            largest = max(largest, *of_mtp)
        return sum(stages), max(max(stages) / dims.stage_size, largest)

    def group_size(self, dims: ParallelDims) -> int:
        return dims.stage_size


@cache
def _matrix_flops(layer: ModelShape) -> Sequence[int]:
    """Operations for each matrix of a model's only layer that Muon updates."""
    return [
        newton_schulz_flops(size)
        for name, size in hf_tensors(layer).items()
        if ".layers." in name and ".indexer." not in name and is_matrix(name, size)
    ]


def planned_optimizer(cfg: Config) -> Optimizer:
    """The optimizer of a config."""
    keys = cfg.optimizer
    master = 0 if cfg.model.dtype == "float32" else FLOAT  # weights are their own master weights
    copied = 0 if keys.grad_reduce_in_fp32 else FLOAT  # gradients in float32
    adam = {"master_itemsize": master, "moments_itemsize": 2 * FLOAT, "copied_itemsize": copied}
    if keys.optimizer_cpu_offload:
        return HostOptimizer(**adam, fraction=keys.optimizer_offload_fraction)
    if keys.use_precision_aware_optimizer:
        moments = [ITEMSIZE[dtype] for dtype in (keys.exp_avg_dtype, keys.exp_avg_sq_dtype)]
        return Optimizer(
            master_itemsize=min(master, REST_BYTES),
            moments_itemsize=sum(moments),
            # Its kernel takes two moments of the same dtype (Transformer Engine from 2.14 on).
            copied_itemsize=FLOAT if len(set(moments)) > 1 else 0,
        )
    match keys.optimizer:
        case "adam":
            return Optimizer(**adam)
        case "muon":
            return Muon(**adam)
