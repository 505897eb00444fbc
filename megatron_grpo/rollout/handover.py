"""The folder in which new weights are handed to the engines."""

import fcntl
import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megatron_grpo.config import Config

SHARED_MEMORY = Path("/dev/shm")
OWNER_FILE = "owner"


def handover_folder(cfg: Config) -> Path:
    """A folder of the run's own in `rollout.sync_dir`, or else in the shared memory of this host.

    The same at every start of the run, so that a start clears what a killed one left.
    """
    digest = hashlib.sha256(str(cfg.train.run_dir.resolve()).encode()).hexdigest()[:12]
    return (cfg.rollout.sync_dir or SHARED_MEMORY) / f"megatron-grpo-{digest}"


def claim_folder(folder: Path) -> TextIO:
    """Lock the folder for as long as what is returned stays open; the kernel ends it with us."""
    owner = (folder / OWNER_FILE).open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    return owner


def clear_abandoned_folders() -> None:
    """Remove from shared memory what killed runs left there: it is memory of this host.

    A lock and not a process id tells, because containers may share the memory and not the ids.
    """
    for path in SHARED_MEMORY.glob(f"megatron-grpo-*/{OWNER_FILE}"):
        with path.open() as owner, suppress(BlockingIOError):
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)


def check_handover(cfg: Config, num_bytes: int) -> None:
    """Raise ValueError when weights of `num_bytes` cannot be handed over where the config says."""
    folder = handover_folder(cfg)
    if not folder.parent.is_dir():
        raise ValueError(
            f"rollout.sync_dir {folder.parent} is not a folder: make it, or leave it out"
        )
    present = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = shutil.disk_usage(folder.parent).free + present
    if num_bytes > free:
        raise ValueError(
            f"{folder.parent} has {free:,} bytes free and new weights take {num_bytes:,}: set "
            "rollout.sync_dir to a folder with more, which the engines see too"
        )
