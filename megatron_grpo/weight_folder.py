"""Pushes by way of a folder (`rollout.weight_transport: disk`): ranks export, workers read.

For engines that share a file system with the ranks, but no network besides HTTP. What is verified,
and when an engine serves, is the same as over channels.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.hf_export import create_export, shard_bytes_for, write_weights
from checkpoint_convert.megatron import file_layout
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.checksums import sums_of_copies
from megatron_grpo.engine_weights.protocol import Json, WorkerSums
from megatron_grpo.engines.client import RolloutClient, meanwhile
from megatron_grpo.engines.http import RolloutAborted
from parallel import Copy, Layout, Sender
from parallel.collectives import raise_first_failure


class WeightFolder:
    """A rank's end of the folder `pushed` in the run directory, which is there during a push.

    It takes the place of `WeightChannels`.
    """

    def __init__(
        self,
        cfg: Config,
        shape: ModelShape,
        sender: Sender,
        workers: Sequence[Layout],
        sends: Mapping[int, Sequence[Copy]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """`sends` is this rank's share of what the `workers` hold in `dtypes`."""
        self._cfg, self._shape, self._sender = cfg, shape, sender
        self._workers, self._sends, self._dtypes = workers, sends, dtypes
        self._folder = cfg.train.run_dir.absolute() / "pushed"
        self._is_known = False
        """Whether the workers know the folder."""

    @property
    def init_info(self) -> Json:
        """What workers are told instead of channels; see `open_receiver`."""
        # What decides which part of the weights each worker holds.
        sizes = {"tensor_parallel_size", "data_parallel_size", "vllm", "sglang"}
        fields = {"engine", "max_completion_length", *sizes}
        rollout = self._cfg.rollout.model_dump(mode="json", include=fields)
        model = str(self._cfg.model.path.absolute())
        return {"folder": str(self._folder), "model": model, "rollout": rollout}

    def open(self, engines: RolloutClient | None, num_engines: int) -> None:
        """Tell all workers of all engines of the folder, unless they know it."""
        if engines is not None and not self._is_known:
            engines.open_channels(self.init_info, lambda: True)
        self._is_known = True

    def prepare(self, parameters: Mapping[str, Tensor]) -> None:
        """Write `parameters`, this rank's shard; on return all ranks have written. Collective.

        Raises RolloutAborted on all ranks if one could not write, such as when the disk is full.
        """
        try:
            raise_first_failure(self._create, RolloutAborted)
            raise_first_failure(lambda: self._fill(parameters), RolloutAborted)
        except RolloutAborted:
            self.finish()  # the last checkpoint needs the room
            raise

    def send(
        self, engines: RolloutClient | None, push: str, parameters: Mapping[str, Tensor]
    ) -> Mapping[int, WorkerSums]:
        """Let the workers read the folder.

        Returns the checksums of this rank's share of what each worker reads. Raises
        ConnectionError.
        """
        with meanwhile(engines, lambda engines, _: engines.receive_push(push, lambda: True)):
            return sums_of_copies(parameters, self._sends, self._workers, self._dtypes)

    def finish(self) -> None:
        """Remove the folder, which no worker reads any more."""
        if self._sender.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder; the next `open` tells the workers of it again."""
        self.finish()
        self._is_known = False

    def _create(self) -> None:
        if self._sender.rank > 0:
            return
        self.finish()  # that of a push which was killed
        dtype = getattr(torch, self._cfg.model.dtype)
        shard_bytes = shard_bytes_for(dist.get_world_size(), self._shape, dtype)
        shape = replace(self._shape, num_mtp_layers=0)  # no worker reads these
        with _naming_errors():
            create_export(self._folder, self._cfg.model.path, shape, dtype, shard_bytes)

    def _fill(self, parameters: Mapping[str, Tensor]) -> None:
        rank, layout = self._sender.rank, self._sender.layout
        with _naming_errors():
            files = file_layout(self._shape)
            write_weights(self._folder, layout, parameters, first_file=rank, files=files)


@contextmanager
def _naming_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # such as a disk that is full
        raise RolloutAborted(f"the weights of a push cannot be written: {error}") from error
