"""The two ends of a push of weights: from trainer ranks into the parameters of engine workers.

Trainer ranks send to the workers of the first engine, and worker w of each engine forwards what
arrives, bucket by bucket, to worker w of the next. Trainer ranks know what each worker needs
(`cut_shares`); a worker reads their plans from the rendezvous, and refuses plans that do not fill
its parameters exactly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest

import torch
from torch import Tensor

from parallel.checksum import added_up, checksums
from parallel.layout import Copy, Shape
from parallel.weight_transfer.channels import ChannelSet, synchronize
from parallel.weight_transfer.connect import (
    Peer,
    Worker,
    check_arriving,
    plan_text,
    read_plan,
)
from parallel.weight_transfer.rendezvous import Rendezvous, TransferInitInfo, join, memory_domain
from parallel.weight_transfer.streams import InStream, OutStream, Packing

TIMEOUT = timedelta(seconds=60)
"""Longest time without progress in a channel, and longest wait for the other end to open it."""


class WeightSender:
    """The channels of a trainer rank. A failure closes all of them; a retry opens new ones."""

    def __init__(
        self,
        init_info: TransferInitInfo,
        rendezvous: Rendezvous,
        rank: int,
        sends: Mapping[int, Sequence[Copy]],
        shapes: Sequence[Mapping[str, Shape]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        """Publish the copies that `rank` sends to each worker (`sends`), and open the channels.

        `shapes` are of each worker's parameters, `dtypes` of all workers' parameters; tensors on
        `device` are sent in these dtypes. A copy must fit into a bucket. Raises ChannelError when a
        worker does not connect within `timeout`, and at once when any process of the rendezvous has
        failed; publishes its own failure there.
        """
        workers = [worker for worker, ranks in enumerate(init_info.senders) if rank in ranks]
        assert sorted(sends) == workers, f"rank {rank} sends to {sorted(sends)}, not {workers}"
        self.bytes_sent = 0
        """Bytes sent in all successful pushes so far."""
        self._device = device
        self._channels = ChannelSet()
        peer = Peer(f"trainer rank {rank}", init_info, rendezvous, device, timeout)
        with rendezvous.publishing_failures(peer.name):
            packings = [
                Packing(
                    [copy.destination_box for copy in sends[worker]],
                    [dtypes[copy.destination] for copy in sends[worker]],
                    init_info.bucket_bytes,
                )
                for worker in workers
            ]
            for worker in workers:
                rendezvous.publish(f"plan/{rank}/{worker}", plan_text(sends[worker], dtypes))
            receivers = {f"0/{rank}/{worker}": Worker(0, worker) for worker in workers}
            channels, _ = peer.open_channels(self._channels, receivers, senders={})
        self._num_bytes = sum(packing.num_bytes for packing in packings)
        self._streams = {
            worker: OutStream(channel, sends[worker], shapes[worker], packing, device)
            for worker, channel, packing in zip(workers, channels, packings, strict=True)
        }

    def send_weights(self, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, int]]:
        """Send the boxes of `tensors`, by name, to all workers at the same time.

        Returns when the workers have received everything: by worker and parameter name, checksums
        of the boxes that this rank has sent. On failure, closes all channels and raises the first
        error, ChannelError if a worker was lost.
        """
        # Channels copy in streams of their own, which do not wait for the writers of the tensors.
        synchronize(self._device)
        streams = self._streams.values()
        sums = self._channels.run_all([partial(stream.send_boxes, tensors) for stream in streams])
        self.bytes_sent += self._num_bytes
        return dict(zip(self._streams, map(added_up, sums), strict=True))

    def close(self) -> None:
        self._channels.close()


class WeightReceiver:
    """The channels of an engine's worker. A failure closes all of them; a retry opens new ones."""

    def __init__(
        self,
        init_info: TransferInitInfo,
        engine: int,
        worker: int,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        """Join the rendezvous, check the trainer ranks' plans, and open the channels of a worker.

        `parameters`, by name, are on `device`. Raises ValueError, naming the parameters, when the
        plans do not fill each exactly; ChannelError when a trainer rank or a worker of a
        neighbouring engine does not connect within `timeout`, and at once when any process of the
        rendezvous has failed. Publishes its own failure there.
        """
        me = Worker(engine, worker)
        self.bytes_received = 0
        """Bytes received in all successful pushes so far."""
        self._device = device
        self._channels = ChannelSet()
        rendezvous = join(init_info.rendezvous, timeout)
        peer = Peer(str(me), init_info, rendezvous, device, timeout)
        with rendezvous.publishing_failures(peer.name):
            self._padding, self._kinds = init_info.padding(worker), _kinds(parameters)
            ranks = init_info.senders[worker]
            names = {f"plan/{rank}/{worker}": f"trainer rank {rank}" for rank in ranks}
            plans = [read_plan(text) for text in rendezvous.await_texts(names, timeout)]
            check_arriving([*chain(*plans)], parameters, self._padding)
            arrivals = [[(name, box) for name, _, box in plan] for plan in plans]
            packings = [
                Packing(
                    [box for _, box in boxes],
                    [parameters[name].dtype for name, _ in boxes],
                    init_info.bucket_bytes,
                )
                for boxes in arrivals
            ]
            # Before any wait for channels: the previous engine waits for this text.
            rendezvous.publish(me.key, memory_domain(device))
            before, after = Worker(engine - 1, worker), Worker(engine + 1, worker)
            is_last = after.engine == init_info.num_engines
            onward, channels = peer.open_channels(
                self._channels,
                {} if is_last else {f"{after.engine}/{rank}/{worker}": after for rank in ranks},
                {
                    f"{engine}/{rank}/{worker}": str(before) if engine else f"trainer rank {rank}"
                    for rank in ranks
                },
            )
        self._num_bytes = sum(packing.num_bytes for packing in packings)
        # The last engine forwards nothing: `onward` is empty.
        self._streams = [
            InStream(channel, passed_on, boxes, packing, device)
            for channel, passed_on, boxes, packing in zip_longest(
                channels, onward, arrivals, packings
            )
        ]

    def receive_weights(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Fill `parameters` in place with what all trainer ranks send, and forward it.

        Returns the checksum of each parameter when everything has arrived, and the next engine has
        received it. Raises ValueError when `parameters` have other shapes or dtypes than when the
        channels were opened, else the first error, ChannelError if a trainer rank or a worker of
        another engine was lost. Every error closes all channels.
        """
        kinds = _kinds(parameters)
        changed = [name for name, kind in self._kinds.items() if kinds.get(name) != kind]
        if changed:
            self.close()
            raise ValueError(f"parameters changed their shape or type: {', '.join(changed)}")
        synchronize(self._device)
        self._channels.run_all([partial(each.receive_boxes, parameters) for each in self._streams])
        self.bytes_received += self._num_bytes
        # Padding is not sent, and after an engine's sleep its new memory may hold anything.
        for name, box in self._padding:
            parameters[name].data[box.slices].zero_()
        # Only now: one pass over each parameter is faster than kernels for each box that arrives.
        return checksums(parameters)

    def close(self) -> None:
        self._channels.close()


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in parameters.items()}
