"""The two ends of a push of weights: from trainer ranks into the parameters of engine workers.

Trainer ranks send to the workers of the first engine, and worker w of each engine forwards what
arrives, bucket by bucket, to worker w of the next. Trainer ranks know what each worker needs
(`cut_shares`); a worker reads from the meeting's board what it will be sent, and refuses plans that
do not fill its parameters exactly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from parallel.checksum import NamedSum, added_up, checksums
from parallel.layout import Box, Copy, Shape
from parallel.weight_transfer.connect import LinkSet, Party, WirePlan, Worker, check_plans, opened
from parallel.weight_transfer.links import settle
from parallel.weight_transfer.rendezvous import Board, Invitation, join
from parallel.weight_transfer.streams import InStream, OutStream, Packing

TIMEOUT = timedelta(seconds=60)
"""How long a link may make no progress, and one end may wait for the other to open it."""


class Outbox:
    """The links of a trainer rank. A failure closes all of them; a retry opens new ones."""

    def __init__(self, streams: Mapping[int, OutStream], device: torch.device) -> None:
        self._streams = streams  # by worker
        self._device = device
        self._links = LinkSet([stream.link for stream in streams.values()])
        self._bytes_sent = 0

    @classmethod
    def open(
        cls,
        invitation: Invitation,
        board: Board,
        rank: int,
        sends: Mapping[int, Sequence[Copy]],
        shapes: Sequence[Mapping[str, Shape]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> "Outbox":
        """Publish what `rank` sends to each worker, and open the links to them.

        `board` is that of the invitation's meeting, `shapes` are those of each worker's parameters
        and `dtypes` those of all workers'. The tensors are on `device` and are sent as these; no
        copy is larger than a bucket.
        Raises LinkError when a worker does not connect within `timeout`, and at once when any
        process of the meeting has failed; the others are told if this one fails.
        """
        workers = [worker for worker, ranks in enumerate(invitation.senders) if rank in ranks]
        assert sorted(sends) == workers, f"rank {rank} sends to {sorted(sends)}, not {workers}"
        party = Party(f"trainer rank {rank}", invitation, board, device, timeout)
        with party.opening():
            packings = {
                worker: Packing(
                    [copy.destination_box for copy in copies],
                    [dtypes[copy.destination] for copy in copies],
                    invitation.bucket_bytes,
                )
                for worker, copies in sends.items()
            }
            for worker, copies in sends.items():
                board.publish(f"plan/{rank}/{worker}", WirePlan.of(copies, dtypes).to_json())
            offers = party.offer({f"0/{rank}/{worker}": Worker(0, worker) for worker in workers})
            links = zip(workers, opened(offers), strict=True)
        streams = {
            worker: OutStream(link, sends[worker], shapes[worker], packings[worker], device)
            for worker, link in links
        }
        return cls(streams, device)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in all successful pushes so far."""
        return self._bytes_sent

    def send(self, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, int]]:
        """Send the boxes of `tensors`, by name, to all workers at the same time.

        Returns when the workers have received everything: for each worker, by parameter name, the
        checksum of what this rank has sent. On failure, closes all links and raises the first
        error, LinkError if a worker was lost.
        """
        settle(self._device)
        streams = self._streams.values()
        sums = self._links.run([partial(stream.send, tensors) for stream in streams])
        self._bytes_sent += sum(stream.num_bytes for stream in streams)
        return dict(zip(self._streams, map(added_up, sums), strict=True))

    def close(self) -> None:
        """End all links."""
        self._links.close()


class Inbox:
    """The links of an engine's worker. A failure closes all of them; a retry opens new ones."""

    def __init__(
        self,
        streams: Sequence[InStream],
        parameters: Mapping[str, Tensor],
        padding: Sequence[tuple[str, Box]],
        device: torch.device,
    ) -> None:
        self._streams = streams
        self._padding = padding
        self._device = device
        self._links = LinkSet([link for stream in streams for link in stream.links])
        self._kinds = _kinds(parameters)
        self._bytes_received = 0

    @classmethod
    def open(
        cls,
        invitation: Invitation,
        engine: int,
        worker: int,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> "Inbox":
        """Join the meeting, check what will be sent, and open the links of a worker.

        `parameters`, by name, are on `device`. Raises ValueError, naming the parameters, when what
        will be sent does not fill each exactly; LinkError when a trainer rank or a worker of a
        neighbouring engine does not connect within `timeout`, and at once when any process of the
        meeting has failed. The others are told if this one fails.
        """
        me = Worker(engine, worker)
        board = join(invitation.meeting, timeout)
        party = Party(str(me), invitation, board, device, timeout)
        with party.opening():
            plans = _read_plans(party, worker)
            padding = invitation.padding(worker)
            check_plans(plans, parameters, padding)
            arrivals = [plan.arrivals() for plan in plans]
            packings = [
                Packing([box for _, box in boxes], plan.torch_dtypes, invitation.bucket_bytes)
                for plan, boxes in zip(plans, arrivals, strict=True)
            ]
            party.publish_place(me)  # before waiting: the previous engine waits for this
            offers = party.offer(_links_to_next(invitation, me))
            takes = party.take(_links_of(invitation, me))
            # Both at once: otherwise the last of many engines would wait for all before it.
            made: list[Any] = opened([*takes, *offers])
            links, onward = made[: len(takes)], made[len(takes) :]
        streams = [
            InStream(link, passed_on, boxes, packing, device)
            for link, passed_on, boxes, packing in zip_longest(links, onward, arrivals, packings)
        ]
        return cls(streams, parameters, padding, device)

    @property
    def bytes_received(self) -> int:
        """Bytes received in all successful pushes so far."""
        return self._bytes_received

    def receive(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Fill `parameters` in place with what all trainer ranks send, and forward it.

        Returns when everything has arrived and the next engine has received it: the checksum of
        what each parameter holds. Raises ValueError when shapes or types of `parameters` differ
        from those that the links were opened for, else the first error, LinkError if a trainer rank
        or a worker of another engine was lost. Either closes all links.
        """
        kinds = _kinds(parameters)
        changed = [name for name, kind in self._kinds.items() if kinds.get(name) != kind]
        if changed:
            self.close()
            raise ValueError(f"parameters changed their shape or type: {', '.join(changed)}")
        settle(self._device)
        arrived = self._links.run([partial(stream.receive, parameters) for stream in self._streams])
        self._bytes_received += sum(stream.num_bytes for stream in self._streams)
        # Padding is not sent. An engine that slept has new memory, which holds anything.
        for name, box in self._padding:
            parameters[name].data[box.slices].zero_()
        return self._sums(parameters, list(chain(*arrived)))

    def _sums(self, parameters: Mapping[str, Tensor], arrived: list[NamedSum]) -> dict[str, int]:
        if self._device.type != "cpu":
            return checksums(parameters)
        nothing = torch.zeros((), dtype=torch.int64)  # adds nothing to the sum of a parameter
        return added_up([*arrived, *((name, nothing) for name, _ in self._padding)])

    def close(self) -> None:
        """End all links."""
        self._links.close()


def refuse_all(invitation: Invitation, reason: str, timeout: timedelta = TIMEOUT) -> None:
    """Tell all processes that are opening links at once that there will be none, and why."""
    join(invitation.meeting, timeout).refuse(reason)


def _read_plans(party: Party, worker: int) -> list[WirePlan]:
    """The plans of all trainer ranks that send to a worker."""
    ranks = party.invitation.senders[worker]
    names = {f"plan/{rank}/{worker}": f"trainer rank {rank}" for rank in ranks}
    said = party.board.read(names, party.timeout)
    return [WirePlan.from_json(text) for text in said]


def _links_of(invitation: Invitation, worker: Worker) -> dict[str, str]:
    """The names of the links on which a worker receives, one per trainer rank, with the sender."""
    before = Worker(worker.engine - 1, worker.number)
    return {
        f"{worker.engine}/{rank}/{worker.number}": (
            str(before) if worker.engine else f"trainer rank {rank}"
        )
        for rank in invitation.senders[worker.number]
    }


def _links_to_next(invitation: Invitation, worker: Worker) -> dict[str, Worker]:
    """The links on which a worker forwards what it receives; none in the last engine."""
    after = Worker(worker.engine + 1, worker.number)
    if after.engine == invitation.num_engines:
        return {}
    ranks = invitation.senders[worker.number]
    return {f"{after.engine}/{rank}/{after.number}": after for rank in ranks}


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in parameters.items()}
