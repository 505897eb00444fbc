"""Loads the newest good checkpoint, or another run's, on all ranks together.

Loading a pickle calls whatever it names, and torch and Megatron-Core load a checkpoint's index and
objects as pickles: all of them are screened first.
"""

import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch.distributed as dist

from checkpoint_convert.formats.torch_dist import read_object_places
from checkpoint_convert.formats.torch_file import screen
from megatron_grpo.bars import waiting
from megatron_grpo.checkpoints import folders, manifest, trainer_state
from megatron_grpo.checkpoints import state as megatron_state
from megatron_grpo.checkpoints.shard_file import read_parts
from megatron_grpo.checkpoints.trainer_state import TrainerState
from megatron_grpo.config.train import Hook
from megatron_grpo.policy.model import Policy
from megatron_grpo.policy.reference import Reference
from parallel import ParallelDims
from parallel.collectives import first_failure, raise_first_failure


def steps_done(folder: Path) -> int:
    """Optimizer steps of the newest checkpoint in `folder`; 0 if there is none. Collective.

    Rank 0 decides: other hosts may have an outdated view of a network file system. Raises the
    ValueError of `folders.latest_step`.
    """
    return _from_rank_0(lambda: folders.latest_step(folder))


def how_ended(folder: Path, num_steps: int, hooks: Collection[Hook]) -> str:
    """Say how the run in `folder` came to its end, as rank 0 sees it: `folders.how_ended`.
    Collective."""
    return _from_rank_0(lambda: folders.how_ended(folder, num_steps, hooks))


def load_newest(
    folder: Path, dims: ParallelDims, policy: Policy, reference: Reference | None
) -> TrainerState:
    """Load the newest good checkpoint in `folder` into both models; return the state at its step.

    The step is 0 without any checkpoint. A checkpoint that does not match its manifest is reported
    on stderr, and the one before it is tried. Raises on all ranks ValueError if none of the
    checkpoints is good, and TimeoutError if one cannot be read, as it may be good.
    """

    def find() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(folder)
        return folders.candidates(folder)

    reasons: list[str] = []
    way_out = "remove it to continue from the one before"
    for step in _from_rank_0(find):
        checkpoint = folders.step_folder(folder, step)
        damage = _damage(checkpoint, partial(_verify, checkpoint), way_out)
        damage = damage or _damage(
            checkpoint, partial(_read, checkpoint, step, dims, policy, reference), way_out
        )
        if damage is None:
            return trainer_state.read_record(checkpoint, step).state
        reasons.append(f"{checkpoint} is not used: {damage}")
        if dist.get_rank() == 0:
            print(reasons[-1], file=sys.stderr)
    if reasons:
        raise ValueError(
            "no checkpoint of this run can be used; to start over, remove them:\n  "
            + "\n  ".join(reasons)
        )
    return TrainerState(step=0)


def load_start(init_from: Path, policy: Policy) -> None:
    """Load weights, master weights and moments, and nothing else, from a checkpoint of another run.

    Raises on all ranks ValueError if the checkpoint is not good, and TimeoutError if it cannot be
    read.
    """
    checkpoint = _from_rank_0(lambda: folders.checkpoint_at(init_from))  # it may be saving others
    way_out = _from_rank_0(lambda: folders.instead_of(checkpoint))
    damage = _damage(checkpoint, partial(_verify, checkpoint), way_out)
    damage = damage or _damage(checkpoint, partial(_read_start, checkpoint, policy), way_out)
    if damage is not None:
        raise ValueError(f"train.init_from {checkpoint} cannot be used: {damage}; {way_out}")
    if dist.get_rank() == 0:
        print(f"starting from the weights and moments in {checkpoint}")


def _from_rank_0[T](find: Callable[[], T]) -> T:
    """Broadcast rank 0's result of `find`; raises its ValueError on all ranks. Collective."""
    found: list[T] = []
    raise_first_failure(lambda: found.append(find()) if dist.get_rank() == 0 else None, ValueError)
    dist.broadcast_object_list(shared := [found])
    return shared[0][0]


def _damage(checkpoint: Path, read: Callable[[], None], way_out: str) -> ValueError | None:
    """Call `read`; return on all ranks the first rank's error about missing or changed data.

    Raises TimeoutError on all ranks, with the user's `way_out`, if the file system fails to answer.
    """
    found: list[ValueError] = []

    def attempt() -> None:
        try:
            read()
        except FileNotFoundError as error:
            found.append(ValueError(f"{error.filename} is missing"))
        except ValueError as error:
            found.append(error)
        except OSError as error:
            # Not damage: falling back to the checkpoint before would discard an intact one.
            raise TimeoutError(
                f"{checkpoint} cannot be read: {error}. It may be intact: start the same "
                f"command again when it can be read, or {way_out}"
            ) from error

    def raise_found() -> None:
        if found:
            raise found[0]

    raise_first_failure(attempt, TimeoutError)
    return first_failure(raise_found, ValueError)


def _verify(checkpoint: Path) -> None:
    """Check this rank's share of a checkpoint's bytes."""
    rank = dist.get_rank()
    listed = manifest.read_manifest(checkpoint)
    names = manifest.fair_share(listed, rank, dist.get_world_size())
    with waiting(f"verifying {checkpoint.name}", shows=rank == 0) as show:
        manifest.verify(checkpoint, listed, names, show)


def _read(
    checkpoint: Path, step: int, dims: ParallelDims, policy: Policy, reference: Reference | None
) -> None:
    """Load a checkpoint; after a failure, another one overwrites everything, or the run ends."""
    if dist.get_rank() == 0:
        screen_checkpoint(checkpoint)
    record = trainer_state.read_record(checkpoint, step)
    megatron_state.set_counters(policy, record.counters)
    with waiting(f"reading {checkpoint.name}", shows=dist.get_rank() == 0) as show:
        read_parts(checkpoint, megatron_state.parts_saved(policy, reference), show)
    if reference:
        reference.round_averaged_weights()
    if record.layout == dims:  # random states are saved per rank
        row = trainer_state.read_random_state(checkpoint, dist.get_rank())
        megatron_state.set_random_state(row)


def _read_start(checkpoint: Path, policy: Policy) -> None:
    """Load the state that a new run starts from."""
    if dist.get_rank() == 0:
        screen_checkpoint(checkpoint)
    counters = trainer_state.read_record(checkpoint, folders.step_in(checkpoint)).counters
    # The schedule starts anew, but Adam's step count is kept: bias correction must fit the moments.
    own_schedule = {"scheduler": policy.scheduler.state_dict()}
    megatron_state.set_counters(policy, counters | own_schedule)
    parts = megatron_state.parts_saved(policy, None)
    with waiting(f"reading {checkpoint.name}", shows=dist.get_rank() == 0) as show:
        read_parts(checkpoint, parts, show, is_resumed=False)


def screen_checkpoint(folder: Path) -> None:
    """Raise ValueError if loading `folder` would call more than loading tensors requires."""
    common = ("common.pt", 0, (folder / "common.pt").stat().st_size)
    for name, offset, length in [common, *sorted(set(read_object_places(folder / ".metadata")))]:
        with (folder / name).open("rb") as file:
            screen(file.fileno(), folder / name, offset, length)
