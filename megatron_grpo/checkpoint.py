"""Checkpoints of the trainer: weights, optimizer and learning-rate schedule.

Megatron-Core's torch_dist format, in which every rank writes its own shards and which loads at any
other parallel layout. A checkpoint is `step_N`, after N optimizer steps, written under a temporary
name and renamed when it is whole; `LATEST` names the newest. Nothing else needs saving: prompts and
sampling seeds are functions of the step, and there is no dropout.
"""

import os
import queue
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from checkpoint_convert.companions import CHECKPOINT_FOLDER, copy_companions
from checkpoint_convert.torch_words import DTYPE_NAMES
from megatron_grpo.model import Policy, unwrapped

# Every optimizer moment is stored in the shape of its parameter, so that a checkpoint can be loaded
# at another TP, PP or DP. Megatron-Core 0.16's default cannot be saved without Transformer Engine.
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # The optimizer of experts is another than that of the rest, and names go by the parameters.
    "chained_optim_avoid_prefix": True,
}


def save(folder: Path, step: int, policy: Policy, keep: int, model_folder: Path) -> None:
    """Write `folder/step_N` on all ranks together; `keep` checkpoints stay, this one included.

    The config and tokenizer of `model_folder` go along: `checkpoint-convert` needs nothing else.
    """
    name = f"step_{step}"
    partial, final = folder / f"{name}.partial", folder / name
    if dist.get_rank() == 0:
        for leftover in (partial, final):  # of a save that was interrupted, or of a lost rename
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    # Megatron would start a server process for this queue, which outlives a rank that is killed.
    # A save that is waited for writes and reads the queue in one process.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_state(policy, is_loading=False), str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        companions = partial / CHECKPOINT_FOLDER
        companions.mkdir()
        dtype = DTYPE_NAMES[policy.chunks[0].config.params_dtype]
        copy_companions(model_folder, companions, dtype)
        partial.rename(final)
        pointer = folder / "LATEST.partial"
        pointer.write_text(name + "\n")
        os.replace(pointer, folder / "LATEST")
        _drop_others(folder, step, keep)


def latest_step(folder: Path) -> int:
    """Optimizer steps of the newest checkpoint in `folder`; 0 when there is none.

    Raises ValueError when `LATEST` names a checkpoint that is not there.
    """
    pointer = folder / "LATEST"
    if not pointer.exists():
        return 0
    name = pointer.read_text().strip()
    if not (folder / name).is_dir():
        raise ValueError(
            f"{pointer} names {name}, which is not in {folder}: put it back, write another "
            "checkpoint's name into LATEST, or remove LATEST to start anew"
        )
    return int(name.removeprefix("step_"))


def load_latest(folder: Path, policy: Policy) -> int:
    """Load the newest checkpoint into `policy` on all ranks; returns its step, 0 if there is none.

    The layout may be another than the one that it was saved at.
    """
    step = latest_step(folder)
    if step == 0:
        return 0
    checkpoint = folder / f"step_{step}"
    loaded = dist_checkpointing.load(_state(policy, is_loading=True), str(checkpoint))
    for i, chunk in enumerate(policy.chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{i}"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    return step


def _state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    models = {
        f"model{i}": unwrapped(chunk).sharded_state_dict(metadata=OPTIMIZER_METADATA)
        for i, chunk in enumerate(policy.chunks)
    }
    optimizer = policy.optimizer.sharded_state_dict(
        models, is_loading=is_loading, metadata=OPTIMIZER_METADATA
    )
    return {**models, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict()}


def _drop_others(folder: Path, step: int, keep: int) -> None:
    """Drop old checkpoints, and later ones: of a branch that was left when the run went back."""
    steps = sorted(
        int(path.name.removeprefix("step_"))
        for path in folder.glob("step_*")
        if re.fullmatch(r"step_\d+", path.name)
    )
    kept = [other for other in steps if other <= step][-keep:]
    for other in steps:
        if other not in kept:
            shutil.rmtree(folder / f"step_{other}")
