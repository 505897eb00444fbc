"""The policy's weights as Hugging Face files: pushed to the rollout engines, exported for users.

Every rank writes its own boxes of the Hugging Face tensors at their offsets in one set of
safetensors files; nobody gathers anything. A push reuses one such folder, memory-backed by default,
that the engines load. Engines on other hosts need a `rollout.sync_dir` that both sides see.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert import create_export, finish_export, write_weights
from megatron_grpo.config import Config
from megatron_grpo.experience_source import ExperienceSource
from megatron_grpo.model import Policy
from megatron_grpo.rollout import WorkerSums
from megatron_grpo.rollout.handover import (
    claim_folder,
    clear_abandoned_folders,
    handover_folder,
)
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sums import WeightSums, worker_layouts
from parallel.groups import Groups


class WeightSync:
    """Pushes the policy to the engines; every rank makes one and calls `push` together."""

    def __init__(self, cfg: Config, policy: Policy, groups: Groups) -> None:
        self.policy, self.groups = policy, groups
        dtype = getattr(torch, cfg.model.dtype)
        self._device = next(iter(policy.parameters().values())).device
        workers = worker_layouts(policy.shape, cfg.rollout)
        self._sums = WeightSums(policy.layout, workers, dtype)
        self.folder = handover_folder(cfg)
        if groups.rank == 0:
            clear_abandoned_folders()
            shutil.rmtree(self.folder, ignore_errors=True)  # of a start that was killed
            create_export(self.folder, cfg.model.path, policy.shape, dtype)
            self._claim = claim_folder(self.folder)
        dist.barrier()

    def push(self, source: ExperienceSource | None, policy_version: int, timer: PhaseTimer) -> None:
        """Write this rank's weights, then have rank 0 (which holds `source`) load every engine.

        When it returns each engine serves `policy_version` and has dropped its cached prefixes, and
        every worker has been found to hold what the ranks hold. A push that fails is done once more
        from the start. After that ConnectionError names engine, worker and parameters on rank 0,
        for which the other ranks wait, and no engine serves anything. A time-out is not tried
        again: that engine may still be at it.
        """
        with timer.phase("verify_weights"):
            expected = self._sums.of(self.policy.parameters())
        if not self._try_push(source, policy_version, expected, timer, is_last=False):
            self._try_push(source, policy_version, expected, timer, is_last=True)

    def _try_push(
        self,
        source: ExperienceSource | None,
        policy_version: int,
        expected: Sequence[WorkerSums],
        timer: PhaseTimer,
        *,
        is_last: bool,
    ) -> bool:
        """Whether the push succeeded, on all ranks. The last attempt raises instead."""
        with timer.phase("push"):
            write_weights(self.folder, self.policy.layout, self.policy.parameters())
            dist.barrier()
        succeeded = torch.ones(1, dtype=torch.int64, device=self._device)
        if source is not None:
            try:
                source.update_weights(self.folder, policy_version, expected, timer)
            except ConnectionError as error:
                if is_last:
                    raise
                print(f"a push of weights is tried once more: {error}", file=sys.stderr)
                succeeded.zero_()
        dist.broadcast(succeeded, src=0)
        return bool(succeeded)

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
