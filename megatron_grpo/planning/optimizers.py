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
"""Bytes of a float32 master weight that its bfloat16 weight lacks: the precision-aware optimizer
stores only these."""
HOST_COPIES = 3
"""Float32 values per element on the host: master weight and two moments. Gradients come on top."""


class OwnedMatrix(NamedTuple):
    """A range of a matrix (or of some fused ones) that a rank's optimizer owns."""

    owned: int
    """Elements of the range."""
    whole: int
    """Elements of the largest matrix of the weight files that it is cut from."""
    num_splits: int
    """Tensor ranks over which it is split."""


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer on one rank; fields of `StateBytes`."""

    optimizer: int
    """The rank's shard of moments and master weights, and gradients that the optimizer keeps."""
    update: int = 0
    """Additional bytes during an update."""
    host: int = 0
    """Bytes in host memory."""
    exchanged: int = 0
    """Bytes that the rank sends, or receives, during an update."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW: equal bytes for every element, for any dtypes of master weights and moments."""

    master_itemsize: int
    """Bytes of a master weight, without the weight itself."""
    moments_itemsize: int
    """Bytes of all moments."""
    copied_itemsize: int
    """Bytes per element that an update copies."""

    def state_bytes(
        self, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
    ) -> OptimizerBytes:
        """Bytes of a rank's shard. `shards`: owned elements of each parameter, first outside of
        experts, then of experts; `matrices`: those that Muon updates."""
        owned = sum(map(sum, shards))
        return OptimizerBytes(
            optimizer=owned * (self.master_itemsize + self.moments_itemsize),
            update=owned * self.copied_itemsize,
        )

    def flops(self, shape: ModelShape, dims: ParallelDims) -> tuple[float, float]:
        """(operations of an update on all ranks, on the busiest rank), without elementwise ones."""
        return 0.0, 0.0

    def group_size(self, dims: ParallelDims) -> int:
        """Size of the optimizer's own communication group; 1 without one."""
        return 1


@dataclass(frozen=True, kw_only=True)
class HostOptimizer(Optimizer):
    """`optimizer_cpu_offload`: a fraction of the state on the host. Figures are upper bounds.

    Megatron-Core moves whole parameters, in order, until the fraction is reached: the host may hold
    up to one parameter more than the fraction, and the GPU that much less.
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
            # Page-locked gradients: rounded up, but never to more than twice their size.
            pinned = sum(page_locked(size * FLOAT) for size in sizes)
            host += most * HOST_COPIES * FLOAT + min(pinned, 2 * most * FLOAT)
        return OptimizerBytes(
            optimizer=on_gpu * (self.master_itemsize + self.moments_itemsize),
            update=on_gpu * self.copied_itemsize,
            host=host,
        )


def page_locked(num_bytes: int) -> int:
    """Size that torch takes for a page-locked tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon: one moment per matrix. One rank of a stage gathers each matrix and computes its update
    (`WholeMatrices`)."""

    def state_bytes(
        self, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
    ) -> OptimizerBytes:
        """Update: the parts sent and received at a time, and one whole matrix, three times in
        float32 (received, normalized, updated) and twice in bfloat16."""
        adam, owned = super().state_bytes(shards, matrices), sum(each.owned for each in matrices)
        largest = max((each.whole for each in matrices), default=0)
        # Exchanges are cut at MAX_EXCHANGED elements, but never inside of a matrix.
        most = max(largest, min(MAX_EXCHANGED, owned))
        of_matrix = 3 * FLOAT + 2 * ITEMSIZE["bfloat16"]
        # A rank computes one of `num_splits` matrices itself, and sends its parts of the other
        # matrices.
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
    """Newton-Schulz operations of each matrix in a model of one layer."""
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
