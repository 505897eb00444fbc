"""The policy's weights as a Hugging Face folder, for users."""

import shutil
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.hf_export import (
    create_export,
    finish_export,
    shard_bytes_for,
    write_weights,
)
from checkpoint_convert.megatron import hf_tensors
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import Policy
from parallel.failure import raise_first_failure
from parallel.groups import Groups


def export_model(folder: Path, policy: Policy, cfg: Config, groups: Groups) -> None:
    """Write the policy as Hugging Face folder `folder`, replacing an older one when complete.

    Every rank writes its own boxes at their offsets in one set of files, without gathering. If any
    rank has a weight that is not finite, raises FloatingPointError on all ranks and writes nothing.
    """
    raise_first_failure(lambda: _check_finite(policy), FloatingPointError)
    partial = folder.with_name(folder.name + ".partial")
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        dims, dtype = groups.dims, getattr(torch, cfg.model.dtype)
        # The ranks of one pipeline stage that write; its other ranks hold copies.
        num_writers = dims.pipeline * max(dims.tensor, dims.expert_tensor * dims.expert)
        shard_bytes = shard_bytes_for(num_writers, policy.shape, dtype)
        create_export(partial, cfg.model.path, policy.shape, dtype, shard_bytes)
    dist.barrier()
    written = torch.tensor(
        write_weights(partial, policy.layout, policy.parameters(), first_file=groups.rank)
    )
    dist.all_reduce(written)  # also waits until all ranks have written
    if groups.rank == 0:
        wanted = sum(map(prod, hf_tensors(policy.shape).values()))
        assert written == wanted, f"{int(written)} of the model's {wanted} elements were written"
        finish_export(partial, folder)


def _check_finite(policy: Policy) -> None:
    for name, values in policy.parameters().items():
        # Minimum and maximum suffice, and need no mask as large as the tensor.
        if not torch.stack(torch.aminmax(values.detach())).isfinite().all():
            raise FloatingPointError(f"{name} is not finite: nothing is exported")
