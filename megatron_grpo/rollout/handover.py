"""The folder in which new weights are handed to the engines."""

import hashlib
import os
import shutil
from pathlib import Path

import psutil

from megatron_grpo.config import Config

SHARED_MEMORY = Path("/dev/shm")
OWNER_FILE = "owner"


def handover_folder(cfg: Config) -> Path:
    """A folder of the run's own in `rollout.sync_dir`, or else in the shared memory of this host.

    The same at every start of the run, so that a start clears what a killed one left.
    """
    digest = hashlib.sha256(str(cfg.train.run_dir.resolve()).encode()).hexdigest()[:12]
    return (cfg.rollout.sync_dir or SHARED_MEMORY) / f"megatron-grpo-{digest}"


def claim_folder(folder: Path) -> None:
    """Write into the folder which process it belongs to."""
    (folder / OWNER_FILE).write_text(str(os.getpid()))


def clear_abandoned_folders() -> None:
    """Remove from shared memory what runs left whose process is dead: it is memory of this host."""
    for owner in SHARED_MEMORY.glob(f"megatron-grpo-*/{OWNER_FILE}"):
        if not psutil.pid_exists(int(owner.read_text())):
            shutil.rmtree(owner.parent)


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
