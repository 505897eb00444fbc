"""Bytes of a rank's shard of the optimizer: on its GPU, on the host, and during an update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE

FLOAT = ITEMSIZE["float32"]
REST_BYTES = 2
"""Of a float32 master weight beside its bfloat16 weight, in the precision-aware optimizer."""
HOST_COPIES = 3
"""Master weight and two moments, float32, of what is on the host. It also has its gradients."""


@dataclass(frozen=True, kw_only=True)
class ShardBytes:
    """Bytes of one rank."""

    device: int
    """Master weights and moments on the GPU, and gradients that the optimizer keeps."""
    update: int
    """Float32 copies on the GPU, in addition, while weights are updated."""
    host: int


def shard_bytes(cfg: Config, shards: Sequence[Sequence[int]]) -> ShardBytes:
    """Bytes of the `shards`: by optimizer, the elements of each parameter.

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
    return ShardBytes(
        device=(owned - on_host) * per_element,
        update=owned * copies,
        host=sum(_host_bytes(sizes, fraction) for sizes in shards),
    )


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
