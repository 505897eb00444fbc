"""Pushes over channels: from the ranks' shards straight into those of the engines' workers.

Channels last from push to push, until one fails or the engines change.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.protocol import WorkerSums
from megatron_grpo.engines.client import RolloutClient, meanwhile
from parallel import Copy, Layout
from parallel.collectives import broadcast_text
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
    """A rank's end of the channels to all workers of all engines."""

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
        """`sends` is this rank's share of what the `workers` hold in `dtypes`, and `senders` has
        the ranks that send to each worker. Collective."""
        self._workers, self._sends, self._dtypes = workers, sends, dtypes
        self._senders, self._bucket_bytes, self._device = senders, bucket_bytes, device
        self._network_only = rollout.weight_transport == "network"
        # As resolved by the last rank: on rank 0's own host, its name may resolve to loopback.
        address = rendezvous_address(rollout.base_urls, num_hosts, os.environ)
        self._address = broadcast_text(address, source=dist.get_world_size() - 1)
        self._sender: WeightSender | None = None
        self._rendezvous: Rendezvous | None = None

    def open(self, engines: RolloutClient | None, num_engines: int) -> None:
        """Open the channels, unless they are open; collective, and rank 0 has the `engines`."""
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

        def open_channels(engines: RolloutClient, is_sending: Callable[[], bool]) -> None:
            try:
                engines.open_channels(init_info.to_json(), is_sending)
            except OSError as error:
                join(init_info.rendezvous, TIMEOUT).publish_failure(str(error))
                raise

        with meanwhile(engines, open_channels):
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
        """End the rendezvous: all ranks have their channels."""
        self._rendezvous = None

    def send(
        self, engines: RolloutClient | None, push: str, parameters: Mapping[str, Tensor]
    ) -> Mapping[int, WorkerSums]:
        """Send this rank's share of `parameters`; returns the checksums of what it has sent, by
        worker. Raises ConnectionError."""
        assert self._sender is not None

        with meanwhile(engines, lambda engines, is_sending: engines.receive_push(push, is_sending)):
            return self._sender.send_weights(parameters)

    def finish(self) -> None:
        """Channels stay open for the next push."""

    def close(self) -> None:
        """Close the channels; the next `open` opens others."""
        self._rendezvous = None
        if self._sender is not None:
            self._sender.close()
        self._sender = None
