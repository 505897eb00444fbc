"""Checkpoints of a run, which all ranks write and read together.

A save is asynchronous: a rank copies its state to host memory, a thread writes and hashes it while
training continues, and later calls publish the folder. Only state that lives in host memory is
written from its own place, before the next update. Collectives stay on the main thread, and on the
CPU, so no GPU waits. Whenever a process is killed, the manifest identifies the newest complete
checkpoint.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.formats.torch_dist_writer import (
    Chunk,
    file_name,
    file_parts,
    finish_checkpoint,
    index_of,
    place_chunks,
)
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER, copy_sidecar_files
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.checkpoints import folders, manifest
from megatron_grpo.checkpoints import state as megatron_state
from megatron_grpo.checkpoints.experience_file import read_experience, write_experience
from megatron_grpo.checkpoints.manifest import FileHash, hash_files
from megatron_grpo.checkpoints.newest import load_newest, load_start
from megatron_grpo.checkpoints.shard_file import HostMemory, chunks_to_write
from megatron_grpo.checkpoints.trainer_state import (
    Record,
    TrainerState,
    write_random_states,
    write_record,
)
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.policy.chunks import gather_weights
from megatron_grpo.policy.export import check_finite
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.reference import Reference
from megatron_grpo.policy.residency import EVERYTHING_STAYS, Residency
from megatron_grpo.timing import PhaseTimer
from parallel.collectives import raise_first_failure


def write_shared_files(
    folder: Path,
    *,
    cfg: Config,
    record: Record,
    experiences: Mapping[str, Experience | None],
    index: Future[bytes],
    random_states: Tensor,
) -> dict[str, FileHash]:
    """Write the files that rank 0 writes for all ranks; return their hashes.

    `experiences` are by the prefix of their files, `index` lists the chunks in all ranks' files,
    and `random_states` are bytes [ranks, n].
    """
    sidecar = folder / CHECKPOINT_FOLDER
    sidecar.mkdir()
    model = cfg.model
    copy_sidecar_files(model.path, sidecar, NAMES[model.dtype], num_mtp_layers=model.mtp_num_layers)
    (folder / "config.yaml").write_text(dump_config(cfg), encoding="utf-8")
    write_record(folder, record)
    write_random_states(folder, random_states)
    for prefix, experience in experiences.items():
        if experience is not None:
            write_experience(folder, experience, prefix)
    finish_checkpoint(folder, index.result())
    of_ranks = {file_name(rank) for rank in range(len(random_states))}
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return hash_files(folder, (name for name in names if name not in of_ranks))


@dataclass(frozen=True)
class _Saving:
    """A save in progress. First each rank writes its files, then rank 0 publishes the folder."""

    step: int
    folder: Path
    task: Future[dict[str, FileHash]]
    best_values: Mapping[int, float]
    is_written: bool = False
    """Whether all ranks have written their files; the task is then the publishing."""


class Checkpoints:
    """The checkpoints of one run. All ranks make the same calls; a save that fails on one raises
    OSError on all. The constructor raises ValueError for state that checkpoints cannot hold."""

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        reference: Reference | None,
        residency: Residency = EVERYTHING_STAYS,
        on_complete: Callable[[int, Path], None] = lambda step, folder: None,
    ) -> None:
        """`on_complete` is called on all ranks with each checkpoint that is on disk."""
        self._folder, self._residency = cfg.train.run_dir / "checkpoints", residency
        self._on_complete = on_complete
        self._cfg, self._policy, self._reference = cfg, policy, reference
        # Now, while all tensors are on their device: torch cannot cut views of an offloaded tensor.
        self._parts = megatron_state.parts_saved(policy, reference)
        self._num_bytes = megatron_state.num_bytes_saved(policy, reference)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        # An optimizer's state on the host is most of a node's memory: no room for a second one.
        self._memory = HostMemory(borrows=cfg.optimizer.optimizer_cpu_offload)
        self._objects = megatron_state.object_names(policy)
        self._index: Future[bytes] | None = None
        self._saving: _Saving | None = None
        self.newest_step = 0
        """Step of the checkpoint that was loaded or started last."""

    def load(self) -> TrainerState:
        """Load the newest good checkpoint into policy and reference; return the state at its step.

        Without one, step 0 with the policy of `train.init_from`. Raises the ValueError of
        `load_newest` and `load_start`, and OSError without disk space for one more checkpoint.
        """
        state = load_newest(self._folder, self._cfg.dims, self._policy, self._reference)
        if state.step == 0 and (init_from := self._cfg.train.init_from):
            load_start(init_from, self._policy)
        self.newest_step = state.step
        self._check_space()
        return state

    def load_experience(
        self, step: int, prompts: Sequence[Prompt], prefix: str
    ) -> Experience | None:
        """Read the samples that the checkpoint of `step` has under `prefix`."""
        return read_experience(folders.step_folder(self._folder, step), prompts, prefix)

    def save(
        self,
        state: TrainerState,
        experiences: Mapping[str, Experience | None],
        best_values: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Start to save both models in their current state, after waiting for the previous save.

        `experiences` of rank 0 are the ready generations and the samples of open groups, by the
        prefix of their files; its `best_values` those of `train.keep_best` by step. Raises
        FloatingPointError on all ranks, and writes nothing, if a tensor is not finite.
        """
        self.wait()
        gather_weights(self._policy.chunks)  # in place: the parts are views
        parts = [
            replace(part, values=self._residency.readable(part.values)) for part in self._parts
        ]
        values = ((part.key, part.values) for part in parts)
        raise_first_failure(lambda: check_finite(values, "saved"), FloatingPointError)
        self._check_space()
        folder = self._folder / f"step_{state.step}{folders.PARTIAL}"
        raise_first_failure(lambda: self._make_folder(folder), OSError)
        # Copied before this returns: the tensors are views that the next step changes. State that
        # is on the host is not copied: `before_update` waits.
        chunks, tensors = chunks_to_write(parts)
        copies = self._memory.copy(tensors)
        file = folder / file_name(self._rank)
        write_shared = self._shared_files(chunks, file, state, experiences)

        def write() -> dict[str, FileHash]:
            own = {file.name: manifest.write_hashed(file, file_parts(chunks, copies))}
            return own | (write_shared(folder) if write_shared else {})

        self.newest_step = state.step
        self._saving = _Saving(state.step, folder, self._submit(folder, write), best_values)

    def poll(self) -> None:
        """Advance the save in progress if all ranks have finished its stage. Costs an all-reduce of
        one byte over gloo; the first call after all files are written lets rank 0 publish."""
        if self._saving is None:
            return
        # Ranks finish at different times, and `_advance` is collective: all must agree to enter.
        is_done = torch.tensor(self._saving.task.done(), dtype=torch.uint8)
        dist.all_reduce(is_done, dist.ReduceOp.MIN)
        if is_done:
            self._advance(self._saving)

    def before_update(self, timer: PhaseTimer) -> None:
        """Block until the save in progress has written what an update changes in place: the
        optimizer's state of `optimizer_cpu_offload`. Collective."""
        saving = self._saving
        if self._memory.borrows and saving is not None and not saving.is_written:
            with timer.phase("save"):  # which the watchdog lets take long
                self._advance(saving)

    def wait(self) -> None:
        """Block until the save in progress, if any, is a complete checkpoint."""
        while self._saving is not None:
            self._advance(self._saving)

    def close(self) -> None:
        """Abandon a save in progress; for the end of a failed run."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _advance(self, saving: _Saving) -> None:
        """Finish the current stage: after the writing, start to publish; after that, end the
        save."""
        self._saving = None
        hashes: dict[str, FileHash] = {}
        raise_first_failure(lambda: hashes.update(saving.task.result()), OSError)
        if saving.is_written:
            self._on_complete(saving.step, folders.step_folder(self._folder, saving.step))
            return
        gathered: list[Any] | None = [None] * self._num_ranks if self._rank == 0 else None
        dist.gather_object(hashes, gathered)

        # Also on the thread: syncing the folder and removing old checkpoints may take long.
        def publish() -> dict[str, FileHash]:
            for of_rank in gathered or []:
                hashes.update(of_rank)
            if self._rank == 0:
                manifest.write_manifest(saving.folder, hashes)
                keep = self._cfg.train.keep_checkpoints
                folders.publish(saving.folder, saving.step, keep, self._is_kept, saving.best_values)
            return {}

        task = self._submit(saving.folder, publish)
        self._saving = replace(saving, task=task, is_written=True)

    def _is_kept(self, step: int) -> bool:
        """Whether the checkpoint of `step` stays for good: `train.keep_every`."""
        every, schedule = self._cfg.train.keep_every, BatchSchedule.of(self._cfg.grpo)
        # Unlike `saves_after`, any step counts: older releases saved within generations.
        return every is not None and step % every < schedule.updates_per_generation

    def _submit(
        self, folder: Path, work: Callable[[], dict[str, FileHash]]
    ) -> Future[dict[str, FileHash]]:
        def named() -> dict[str, FileHash]:
            try:
                return work()
            except Exception as error:  # of any kind: it must reach all ranks
                raise OSError(f"{folder} cannot be written: {error}") from error

        return self._thread.submit(named)

    def _shared_files(
        self,
        chunks: Sequence[Chunk],
        file: Path,
        state: TrainerState,
        experiences: Mapping[str, Experience | None],
    ) -> Callable[[Path], dict[str, FileHash]] | None:
        """Prepare to write the files of rank 0 for all ranks; None on other ranks. Collective."""
        random = megatron_state.random_state()
        rows = [torch.empty_like(random) for _ in range(self._num_ranks)]
        dist.gather(random, rows if self._rank == 0 else None)
        if self._index is None:  # ranks have the same parts in every save
            gathered: list[Any] | None = [None] * self._num_ranks if self._rank == 0 else None
            dist.gather_object((place_chunks(file, chunks), self._objects), gathered)
            placed = [each for of_rank, _ in gathered or [] for each in of_rank]
            objects = [name for _, of_rank in gathered or [] for name in of_rank]
            # The thread runs this before the write that needs it; empty except on rank 0.
            self._index = self._thread.submit(index_of, placed, objects)
        if self._rank != 0:
            return None
        record = Record(
            state=state,
            layout=self._cfg.dims,
            counters=megatron_state.counters(self._policy),
            cursor=asdict(BatchSchedule.of(self._cfg.grpo).cursor(state.step)),
        )
        return partial(
            write_shared_files,
            cfg=self._cfg,
            record=record,
            experiences=experiences,
            index=self._index,
            random_states=torch.stack(rows),
        )

    def _make_folder(self, folder: Path) -> None:
        if self._rank == 0:
            if folder.exists():  # left by a failed save
                folders.remove(folder)
            folder.mkdir(parents=True)

    def _check_space(self) -> None:
        """Raise OSError on all ranks if the disk cannot hold one more checkpoint. Collective."""
        total = torch.tensor(self._num_bytes)
        dist.all_reduce(total)

        def check() -> None:
            if self._rank != 0:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            if total > free:
                raise OSError(
                    f"{self._folder} has {free:,} bytes free, but a checkpoint takes "
                    f"{int(total):,}: make room, lower train.keep_checkpoints, or set train.run_dir"
                )

        raise_first_failure(check, OSError)
