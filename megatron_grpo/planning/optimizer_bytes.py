"""Bytes of a rank's shard of the optimizer: on its GPU, on the host, and during an update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.policy.matrices import MAX_EXCHANGED

FLOAT = ITEMSIZE["float32"]
REST_BYTES = 2
"""Of a float32 master weight beside its bfloat16 weight, in the precision-aware optimizer."""
HOST_COPIES = 3
"""Master weight and two moments, float32, of what is on the host. It also has its gradients."""


@dataclass(frozen=True, kw_only=True)
class ShardBytes:
    """Bytes of one rank."""

    device: int
    """Master weights and moments (of a matrix, Muon's one) on the GPU, and gradients that the
    optimizer keeps."""
    update: int
    """In addition on the GPU, while weights are updated: float32 copies, or Muon's matrices and
    what it sends and receives of them."""
    host: int
    exchanged: int
    """What the rank sends of matrices, or receives, while Muon updates them."""


class OwnedMatrix(NamedTuple):
    """A parameter that Muon updates, of which a rank owns a range."""

    owned: int
    """Elements of the range."""
    whole: int
    """Elements of the largest matrix of the weight files of which it has a part."""
    num_splits: int
    """Tensor ranks over which it is split."""


def shard_bytes(
    cfg: Config, shards: Sequence[Sequence[int]], matrices: Sequence[OwnedMatrix]
) -> ShardBytes:
    """Bytes of the `shards`: by optimizer, the elements of each parameter; some are of `matrices`.

    Exact, but for a part on the host: Megatron-Core takes parameters in its order until they are
    that fraction or more. On either side it is then at most this, and less by one parameter.
    """
    keys, owned = cfg.optimizer, sum(map(sum, shards))
    fraction = keys.optimizer_offload_fraction if keys.optimizer_cpu_offload else 0.0
    moments = [ITEMSIZE[dtype] for dtype in (keys.exp_avg_dtype, keys.exp_avg_sq_dtype)]
    per_element, copies = _master_bytes(cfg) + sum(moments), 0
    if keys.optimizer_cpu_offload:
        per_element += 0 if keys.grad_reduce_in_fp32 else FLOAT
    elif keys.use_precision_aware_optimizer:
        # Its kernel takes two moments of the same dtype (Transformer Engine from 2.14 on).
        copies = FLOAT if len(set(moments)) > 1 else 0
    else:
        copies = 0 if keys.grad_reduce_in_fp32 else FLOAT
    on_host = sum(math.ceil(fraction * sum(sizes)) for sizes in shards)
    in_matrices = sum(each.owned for each in matrices)
    return ShardBytes(
        device=(owned - on_host) * per_element - in_matrices * FLOAT,  # one moment instead of two
        update=owned * copies + _round_bytes(matrices),
        host=sum(_host_bytes(sizes, fraction) for sizes in shards),
        # A matrix is computed by a rank that has a part of it: ranks send what others compute.
        exchanged=FLOAT * sum(each.owned - each.owned // each.num_splits for each in matrices),
    )


def _round_bytes(matrices: Sequence[OwnedMatrix]) -> int:
    """Bytes of the parts that a rank sends and receives at a time for Muon, and of a matrix: in
    float32 as it comes, normalized and as it goes, and twice in bfloat16."""
    largest = max((each.whole for each in matrices), default=0)
    most = max(largest, min(MAX_EXCHANGED, sum(each.owned for each in matrices)))
    return 2 * FLOAT * most + (3 * FLOAT + 2 * ITEMSIZE["bfloat16"]) * largest


def _host_bytes(sizes: Sequence[int], fraction: float) -> int:
    if not fraction or not sum(sizes):
        return 0
    most = min(sum(sizes), math.ceil(fraction * sum(sizes)) + max(sizes))
    pinned = sum(page_locked(size * FLOAT) for size in sizes)
    return most * HOST_COPIES * FLOAT + min(pinned, 2 * most * FLOAT)


def _master_bytes(cfg: Config) -> int:
    if cfg.model.dtype == "float32":  # weights are their own master weights
        return 0
    return REST_BYTES if cfg.optimizer.use_precision_aware_optimizer else FLOAT


def page_locked(num_bytes: int) -> int:
    """What torch takes for page-locked memory of one tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
