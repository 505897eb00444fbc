"""Checkpoints of the trainer: weights, optimizer, learning-rate schedule and step.

Megatron-Core's torch_dist format, in which every rank writes its own shards and which loads at any
other parallel layout. A checkpoint is `checkpoints/step_N`, written under a temporary name and
renamed when it is whole; `checkpoints/LATEST` names the newest. Nothing else needs saving: prompts
and sampling seeds are functions of the step, and there is no dropout.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_grpo.model import Policy

# Every optimizer moment is stored in the shape of its parameter, so that a checkpoint can be loaded
# at another TP, PP or DP. Megatron-Core 0.16's default cannot be saved without Transformer Engine.
OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: Path, step: int, policy: Policy, keep: int) -> None:
    """Write `folder/step_N` on all ranks together, and drop all but the newest `keep`."""
    name = f"step_{step}"
    partial, final = folder / f"{name}.partial", folder / name
    if dist.get_rank() == 0:
        for leftover in (partial, final):  # of a save that was interrupted, or of a lost rename
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(policy, step, is_loading=False), str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)
        pointer = folder / "LATEST.partial"
        pointer.write_text(name + "\n")
        os.replace(pointer, folder / "LATEST")
        _drop_old(folder, keep)


def load_latest(folder: Path, policy: Policy) -> int:
    """Load the newest checkpoint into `policy` on all ranks; the step it was taken at, 0 if none.

    Raises ValueError when `LATEST` names a checkpoint that is not there.
    """
    pointer = folder / "LATEST"
    if not pointer.exists():
        return 0
    checkpoint = folder / pointer.read_text().strip()
    if not checkpoint.is_dir():
        raise ValueError(
            f"{pointer} names {checkpoint.name}, which is not in {folder}: put it back, "
            "write another checkpoint's name into LATEST, or remove LATEST to start anew"
        )
    loaded = dist_checkpointing.load(_state(policy, 0, is_loading=True), str(checkpoint))
    for i, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    return loaded["step"]


def _state(policy: Policy, step: int, *, is_loading: bool) -> dict[str, Any]:
    models = {
        f"model{i}": chunk.sharded_state_dict(metadata=OPTIMIZER_METADATA)
        for i, chunk in enumerate(policy.chunks)
    }
    optimizer = policy.optimizer.sharded_state_dict(
        models, is_loading=is_loading, metadata=OPTIMIZER_METADATA
    )
    return {
        **models,
        "optimizer": optimizer,
        "scheduler": policy.scheduler.state_dict(),
        "step": step,
    }


def _drop_old(folder: Path, keep: int) -> None:
    steps = sorted(
        (path for path in folder.glob("step_*") if path.suffix != ".partial"),
        key=lambda path: int(path.name.removeprefix("step_")),
    )
    for path in steps[:-keep]:
        shutil.rmtree(path)
