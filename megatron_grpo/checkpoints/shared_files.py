"""The files of a checkpoint that rank 0 writes for all ranks."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpoint_convert.companions import CHECKPOINT_FOLDER, copy_companions
from checkpoint_convert.formats.safetensors_file import NAMES
from checkpoint_convert.formats.torch_dist_writer import file_name, finish_checkpoint
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.experience_file import READY, write_experience
from megatron_grpo.checkpoints.manifest import FileHash, hash_files
from megatron_grpo.checkpoints.trainer_state import Record, write_random_states, write_record
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """The content of these files. Nothing in here changes while training continues."""

    cfg: Config
    record: Record
    experience: Experience | None
    """The generation that the next steps train on, if they continue one."""
    ready: Experience | None
    """The generation after it, if it is already there."""
    index: Future[bytes]
    """The index of the chunks in all ranks' files."""
    random_states: Tensor
    """Bytes [ranks, n]."""

    def write(self, folder: Path) -> dict[str, FileHash]:
        """Write the files; return the hash that each must have when it is read."""
        companions = folder / CHECKPOINT_FOLDER
        companions.mkdir()
        copy_companions(self.cfg.model.path, companions, NAMES[self.cfg.model.dtype])
        (folder / "config.yaml").write_text(dump_config(self.cfg))
        write_record(folder, self.record)
        write_random_states(folder, self.random_states)
        if self.experience is not None:
            write_experience(folder, self.experience)
        if self.ready is not None:
            write_experience(folder, self.ready, READY)
        finish_checkpoint(folder, self.index.result())
        of_ranks = {file_name(rank) for rank in range(len(self.random_states))}
        names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        return hash_files(folder, (name for name in names if name not in of_ranks))
