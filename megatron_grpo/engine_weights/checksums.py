"""Weights that pushes carry, and the checksums that workers must report afterwards."""

from collections import ChainMap
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.families.linear import A_LOG
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.layouts import quantized_engine, worker_shards
from megatron_grpo.engine_weights.protocol import WorkerSums
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.quantized import QuantizedPolicy, quantized_sender, quantized_shard
from parallel import Copy, Layout, Sender, cut_shares, plan_shares
from parallel.checksum import added_up, checksum
from parallel.groups import Groups
from parallel.views import as_local, as_whole

MAX_ELEMENTS = 1 << 27
"""Maximum number of elements of a temporary copy."""
NOTHING: Mapping[int, WorkerSums] = {}


def pushed_sender(policy: Policy, sender: Sender, cfg: Config, groups: Groups) -> Sender:
    """Tensors that this rank sends: adapters, or the weights of `sender`, maybe quantised."""
    if policy.adapters and cfg.lora.is_served:
        return policy.adapters.sender
    model = quantized_engine(cfg.rollout, policy.shape, cfg.model.dtype)
    return sender if model is None else quantized_sender(sender, model, groups)


def pushed_weights(policy: Policy, cfg: Config, groups: Groups) -> Mapping[str, Tensor]:
    """Local tensors of `pushed_sender`; collective over all ranks."""
    weights = policy.served(cfg.lora)
    if policy.shape.has_mamba:
        # vLLM holds -exp(A_log) in float32 after loading, and pushes fill its parameters directly.
        wide = {name: weights[name].detach().float() for name in weights if name.endswith(A_LOG)}
        changed = {name: -value.exp() for name, value in wide.items()}
        weights = ChainMap(changed, weights)  # type: ignore[arg-type]  # it is only read
    if cfg.rollout.quantization == "none":
        # For an export: engines hold the values that the passes compute with, in model.dtype.
        return policy.as_read(weights) if isinstance(policy, QuantizedPolicy) else weights
    model = quantized_engine(cfg.rollout, policy.shape, cfg.model.dtype)
    assert model is not None, "rollout.quantization is not none"
    return quantized_shard(weights, policy.layout, model, groups)


def sums_of_all_ranks(
    sent: Mapping[int, WorkerSums],
    workers: Sequence[Layout],
    loaded: Mapping[int, WorkerSums] = NOTHING,
) -> Sequence[WorkerSums]:
    """Checksums of every worker's parameters, added up over the parts of all ranks: `sent` by a
    push, or `loaded` by engines. Padding is zero. Collective: one all-reduce."""
    names = [(number, name) for number, worker in enumerate(workers) for name in worker.shapes]
    own = [{**loaded.get(n, {}), **sent.get(n, {})} for n in range(len(workers))]
    # int64 wraps around in the same way on ranks and workers.
    sums = torch.tensor([own[number].get(name, 0) for number, name in names], dtype=torch.int64)
    dist.all_reduce(sums)
    totals: list[dict[str, int]] = [{} for _ in workers]
    for (number, name), total in zip(names, sums.tolist(), strict=True):
        totals[number][name] = total
    return totals


def loaded_sums(
    cfg: Config, shape: ModelShape, sender: Sender, weights: Mapping[str, Tensor]
) -> dict[int, WorkerSums]:
    """Checksums, by worker, of this rank's part of the weights that engines load themselves; empty
    if pushes bring all."""
    if not (cfg.lora.is_served and cfg.num_engines):
        return {}
    shards = worker_shards(cfg, shape)
    sends = cut_shares(plan_shares(sender, shards.weights), MAX_ELEMENTS)
    dtypes = {name: getattr(torch, dtype) for name, dtype in shards.dtypes.items()}
    return sums_of_copies(weights, sends, shards.weights, dtypes)


def sums_of_copies(
    weights: Mapping[str, Tensor],
    sends: Mapping[int, Sequence[Copy]],
    workers: Sequence[Layout],
    dtypes: Mapping[str, torch.dtype],
) -> dict[int, WorkerSums]:
    """Checksums of the copies of a rank's `weights` in the tensors of each worker."""

    def part(worker: int, copy: Copy) -> Tensor:
        name, box = copy.destination, copy.destination_box
        values = weights[copy.source].detach()[copy.source_box.slices]
        values = as_local(as_whole(values, copy.source_axes), copy.destination_axes, len(box.size))
        # In the engine's dtype, to which it rounded the weights when it loaded them.
        return checksum(values.to(dtypes[name]).contiguous(), box, workers[worker].shapes[name])

    return {
        worker: added_up((copy.destination, part(worker, copy)) for copy in copies)
        for worker, copies in sends.items()
    }
