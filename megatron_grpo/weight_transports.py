"""Two transports for the weights of a push: channels, and a folder.

Channels carry weights from the ranks' shards straight into the workers' shards. The folder
(`rollout.weight_transport: disk`) is for engines that share a file system with the ranks, but no
network except HTTP. Verification is equal for both, and so is the moment when an engine serves.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.hf_export import create_export, shard_bytes_for, write_weights
from checkpoint_convert.megatron import file_layout
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.checksums import sums_of_copies
from megatron_grpo.engine_weights.layouts import quantized_engine
from megatron_grpo.engine_weights.protocol import Json, WorkerSums
from megatron_grpo.engines.client import RolloutClient, meanwhile
from megatron_grpo.engines.http import RolloutAborted
from parallel import Copy, Layout, Sender
from parallel.collectives import broadcast_text, raise_first_failure
from parallel.weight_transfer import (
    TIMEOUT,
    Rendezvous,
    RendezvousAddress,
    TransferInitInfo,
    WeightSender,
    join,
    open_rendezvous,
    rendezvous_address,
)


class WeightChannels:
    """A rank's end of the channels to all workers of all engines.

    Channels stay open from push to push, until one fails or the engines change.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        workers: Sequence[Layout],
        sends: Mapping[int, Sequence[Copy]],
        dtypes: Mapping[str, torch.dtype],
        *,
        senders: list[list[int]],
        bucket_bytes: int,
        device: torch.device,
        num_hosts: int,
    ) -> None:
        """`sends`: this rank's pieces of the tensors of `workers`, which have `dtypes`; `senders`:
        ranks that send to each worker. Collective."""
        self._workers, self._sends, self._dtypes = workers, sends, dtypes
        self._senders, self._bucket_bytes, self._device = senders, bucket_bytes, device
        self._network_only = rollout.weight_transport == "network"
        # The last rank resolves rank 0's name: on rank 0's own host it may resolve to loopback.
        address = rendezvous_address(rollout.base_urls, num_hosts, os.environ)
        self._address = broadcast_text(address, source=dist.get_world_size() - 1)
        self._sender: WeightSender | None = None
        self._rendezvous: Rendezvous | None = None

    def open(self, engines: RolloutClient | None, num_engines: int) -> None:
        """Open the channels unless they are open; collective. Only rank 0 has `engines`."""
        if self._sender is not None:
            return
        address = None
        if engines is not None:
            address, self._rendezvous = open_rendezvous(self._address)
        text = broadcast_text(json.dumps(asdict(address)) if address else "")
        init_info = TransferInitInfo(
            rendezvous=RendezvousAddress(**json.loads(text)),
            bucket_bytes=self._bucket_bytes,
            num_engines=num_engines,
            network_only=self._network_only,
            senders=self._senders,
            zeros=[
                [(name, [*box.start], [*box.size]) for name, box in worker.zeros]
                for worker in self._workers
            ],
        )

        def open_channels(client: RolloutClient, is_sending: Callable[[], bool]) -> None:
            try:
                client.open_channels(init_info.to_json(), is_sending)
            except OSError as error:
                # The ranks wait in the rendezvous for workers that will not come: end their wait.
                join(init_info.rendezvous, TIMEOUT).publish_failure(str(error))
                raise

        with meanwhile(partial(open_channels, engines) if engines else None):
            self._sender = WeightSender(
                init_info,
                self._rendezvous or join(init_info.rendezvous, TIMEOUT),
                rank=dist.get_rank(),
                sends=self._sends,
                shapes=[worker.shapes for worker in self._workers],
                dtypes=self._dtypes,
                device=self._device,
            )

    def prepare(self, parameters: Mapping[str, Tensor]) -> None:
        """Close the rendezvous: all ranks have their channels."""
        # Not before the phase of `open` has ended on all ranks: the store is rank 0's.
        self._rendezvous = None

    def send(
        self, engines: RolloutClient | None, push: str, parameters: Mapping[str, Tensor]
    ) -> Mapping[int, WorkerSums]:
        """Send this rank's pieces of `parameters`; returns their checksums by worker. Raises
        ConnectionError."""
        assert self._sender is not None
        with meanwhile(partial(engines.receive_push, push) if engines else None):
            return self._sender.send_weights(parameters)

    def finish(self) -> None:
        """Do nothing: channels stay open for the next push."""

    def close(self) -> None:
        """Close the channels; the next `open` opens new ones."""
        self._rendezvous = None
        if self._sender is not None:
            self._sender.close()
        self._sender = None


class WeightFolder:
    """A rank's end of the folder `pushed` in the run directory, which exists during a push."""

    def __init__(
        self,
        cfg: Config,
        shape: ModelShape,
        sender: Sender,
        workers: Sequence[Layout],
        sends: Mapping[int, Sequence[Copy]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """`sends`: this rank's pieces of the tensors of `workers`, which have `dtypes`."""
        self._cfg, self._shape, self._sender = cfg, shape, sender
        self._workers, self._sends, self._dtypes = workers, sends, dtypes
        self._quantized = quantized_engine(cfg.rollout, shape, cfg.model.dtype)
        self._folder = cfg.train.run_dir.absolute() / "pushed"
        self._is_known = False
        """Whether the workers have the folder's path."""

    @property
    def init_info(self) -> Json:
        """Message to the workers in place of a `TransferInitInfo`; see `open_receiver`."""
        # Settings that decide the part of the weights of each worker, and its precision.
        sizes = {"tensor_parallel_size", "data_parallel_size", "vllm", "sglang"}
        precision = {"quantization", "quantization_ignore"}
        fields = {"engine", "max_completion_length", *sizes, *precision}
        rollout = self._cfg.rollout.model_dump(mode="json", include=fields)
        model, dtype = str(self._cfg.model.path.absolute()), self._cfg.model.dtype
        return {"folder": str(self._folder), "model": model, "dtype": dtype, "rollout": rollout}

    def open(self, engines: RolloutClient | None, num_engines: int) -> None:
        """Send the folder's path to all workers of all engines, unless they have it."""
        if engines is not None and not self._is_known:
            engines.open_channels(self.init_info, lambda: True)
        self._is_known = True

    def prepare(self, parameters: Mapping[str, Tensor]) -> None:
        """Write `parameters`, this rank's shard; on return all ranks have written. Collective.

        Raises RolloutAborted on all ranks if one cannot write, as when the disk is full."""
        try:
            raise_first_failure(self._create, RolloutAborted)
            raise_first_failure(lambda: self._fill(parameters), RolloutAborted)
        except RolloutAborted:
            self.finish()  # makes room on the disk for the run's last checkpoint
            raise

    def send(
        self, engines: RolloutClient | None, push: str, parameters: Mapping[str, Tensor]
    ) -> Mapping[int, WorkerSums]:
        """Let the workers read the folder; returns the checksums of this rank's pieces by worker.
        Raises ConnectionError."""
        with meanwhile((lambda _: engines.receive_push(push, lambda: True)) if engines else None):
            return sums_of_copies(parameters, self._sends, self._workers, self._dtypes)

    def finish(self) -> None:
        """Remove the folder: no worker reads it any more."""
        if self._sender.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder; the next `open` sends its path to the workers again."""
        self.finish()
        self._is_known = False

    def _create(self) -> None:
        if self._sender.rank > 0:
            return
        self.finish()  # removes the folder of a killed push
        dtype = getattr(torch, self._cfg.model.dtype)
        shard_bytes = shard_bytes_for(dist.get_world_size(), self._shape, dtype)
        shape = replace(self._shape, num_mtp_layers=0)  # workers read no MTP layers
        with _abort_on_errors():
            create_export(
                self._folder, self._cfg.model.path, shape, dtype, shard_bytes, self._quantized
            )

    def _fill(self, parameters: Mapping[str, Tensor]) -> None:
        rank, layout = self._sender.rank, self._sender.layout
        with _abort_on_errors():
            files = None if self._quantized else file_layout(self._shape)
            write_weights(self._folder, layout, parameters, first_file=rank, files=files)


@contextmanager
def _abort_on_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # such as a disk that is full
        raise RolloutAborted(f"the weights of a push cannot be written: {error}") from error
