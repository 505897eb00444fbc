"""The policy's weights as a Hugging Face folder, for users."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.hf_export import (
    create_export,
    finish_export,
    shard_bytes_for,
    write_weights,
)
from megatron_grpo.config.config import Config
from megatron_grpo.policy.model import Policy
from parallel.groups import Groups


def export_model(folder: Path, policy: Policy, cfg: Config, groups: Groups) -> None:
    """Write the policy as Hugging Face folder `folder`, replacing an older one when complete.

    Every rank writes its own boxes at their offsets in one set of files; nobody gathers anything.
    """
    partial = folder.with_name(folder.name + ".partial")
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        dims, dtype = groups.dims, getattr(torch, cfg.model.dtype)
        # Of a stage; all others hold copies.
        num_writers = dims.pipeline * max(dims.tensor, dims.expert_tensor * dims.expert)
        shard_bytes = shard_bytes_for(num_writers, policy.shape, dtype)
        create_export(partial, cfg.model.path, policy.shape, dtype, shard_bytes)
    dist.barrier()
    write_weights(partial, policy.layout, policy.parameters(), first_file=groups.rank)
    dist.barrier()
    if groups.rank == 0:
        finish_export(partial, folder)
