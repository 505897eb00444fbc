"""The policy's weights as Hugging Face files: pushed to the rollout engines, exported for users.

Every rank writes its own boxes of the Hugging Face tensors at their offsets in one set of
safetensors files; nobody gathers anything. A push reuses one such folder, memory-backed by default,
that the engines load. Engines on other hosts need a `rollout.sync_dir` that both sides see.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert import create_export, finish_export, write_weights
from megatron_grpo.config import Config
from megatron_grpo.experience_source import ExperienceSource
from megatron_grpo.model import Policy
from megatron_grpo.rollout.handover import (
    claim_folder,
    clear_abandoned_folders,
    handover_folder,
)
from parallel.groups import Groups


class WeightSync:
    """Pushes the policy to the engines; every rank makes one and calls `push` together."""

    def __init__(self, cfg: Config, policy: Policy, groups: Groups) -> None:
        self.policy, self.groups = policy, groups
        self.folder = handover_folder(cfg)
        if groups.rank == 0:
            clear_abandoned_folders()
            shutil.rmtree(self.folder, ignore_errors=True)  # of a start that was killed
            create_export(
                self.folder, cfg.model.path, policy.shape, getattr(torch, cfg.model.dtype)
            )
            self._claim = claim_folder(self.folder)
        dist.barrier()

    def push(self, source: ExperienceSource | None, policy_version: int) -> None:
        """Write this rank's weights, then have rank 0 (which holds `source`) load every engine.

        When it returns on rank 0 each engine serves `policy_version` and has dropped its cached
        prefixes. The other ranks go on as soon as all have written. They cannot overwrite what an
        engine still reads: before the next push comes an optimizer step, a collective of all ranks.
        """
        write_weights(self.folder, self.policy.layout, self.policy.parameters())
        dist.barrier()
        if source is not None:
            source.update_weights(self.folder, policy_version)

    def close(self) -> None:
        """Remove the folder."""
        if self.groups.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def export_model(folder: Path, policy: Policy, cfg: Config, groups: Groups) -> None:
    """Write the policy as Hugging Face folder `folder`, replacing an older one when complete."""
    partial = folder.with_name(folder.name + ".partial")
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        create_export(partial, cfg.model.path, policy.shape, getattr(torch, cfg.model.dtype))
    dist.barrier()
    write_weights(partial, policy.layout, policy.parameters())
    dist.barrier()
    if groups.rank == 0:
        finish_export(partial, folder)
