"""The push of weights, carried out: from trainer ranks into the parameters of engine workers.

Trainer ranks send to the workers of the first engine, and worker w of each engine passes on what
arrives, bucket by bucket, to worker w of the next. Trainer ranks know what each worker needs
(`cut_shares`); a worker reads on the board of the meeting what it is going to be sent, and refuses
what does not fill its parameters exactly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from parallel.checksum import NamedSum, added_up, checksum, checksums
from parallel.layout import Box, Copy, Shape
from parallel.transport.invitation import Invitation
from parallel.transport.link_set import LinkSet, opened
from parallel.transport.links import settle
from parallel.transport.meeting import Board, join
from parallel.transport.party import Party, Worker
from parallel.transport.streams import InStream, OutStream, Packing
from parallel.transport.wire_plan import WirePlan, check_plans

TIMEOUT = timedelta(seconds=60)
"""How long a link may move nothing, and one end wait for the other to open it."""


class Outbox:
    """The links of a trainer rank. After a failure all are closed; a retry opens others."""

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
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> "Outbox":
        """Publish what `rank` sends to each worker, and make the links to them.

        `board` is that of the invitation's meeting, `shapes` are those of each worker's parameters.
        The tensors are on `device` and travel as `dtype`; no copy is larger than a bucket.
        Raises LinkError when a worker does not come within `timeout`, and at once when any process
        of the meeting has failed; that this one has failed the others are told.
        """
        workers = [worker for worker, ranks in enumerate(invitation.senders) if rank in ranks]
        assert sorted(sends) == workers, f"rank {rank} sends to {sorted(sends)}, not {workers}"
        party = Party(f"trainer rank {rank}", invitation, board, device, timeout)
        with party.opening():
            packings = {
                worker: Packing(
                    [copy.destination_box for copy in copies], dtype, invitation.bucket_bytes
                )
                for worker, copies in sends.items()
            }
            for worker, copies in sends.items():
                board.publish(f"plan/{rank}/{worker}", WirePlan.of(copies, dtype).to_json())
            offers = party.offer({f"0/{rank}/{worker}": Worker(0, worker) for worker in workers})
            links = zip(workers, opened(offers), strict=True)
        streams = {
            worker: OutStream(link, sends[worker], shapes[worker], packings[worker], device)
            for worker, link in links
        }
        return cls(streams, device)

    @property
    def bytes_sent(self) -> int:
        """Of all pushes so far that succeeded."""
        return self._bytes_sent

    def send(self, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, int]]:
        """Send the boxes of `tensors`, by name, to all workers at the same time.

        Returns when the workers have taken everything: of each worker, by its parameters, the
        checksum of what this rank has sent. Raises the first failure, LinkError where a
        worker was lost, after all links were closed.
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
    """The links of an engine's worker. After a failure all are closed; a retry opens others."""

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
        """Join the meeting, check what will be sent, and make the links of a worker.

        `parameters`, by name, are on `device`. Raises
        ValueError, naming the parameters, when what will be sent does not fill each exactly, and
        LinkError when a trainer rank or a worker of the next engine does not come within `timeout`,
        and at once when any process of the meeting has failed; that this one has failed the others
        are told.
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
                Packing([box for _, box in boxes], plan.torch_dtype, invitation.bucket_bytes)
                for plan, boxes in zip(plans, arrivals, strict=True)
            ]
            party.publish_place(me)  # first: who waits for it, the engine before, publishes, too
            offers = party.offer(_links_to_next(invitation, me))
            takes = party.take(_links_of(invitation, me))
            # Both ways at once: else the last of many engines would wait for all before it.
            made: list[Any] = opened([*takes, *offers])
            links, onward = made[: len(takes)], made[len(takes) :]
        streams = [
            InStream(link, passed_on, boxes, packing, device)
            for link, passed_on, boxes, packing in zip_longest(links, onward, arrivals, packings)
        ]
        return cls(streams, parameters, padding, device)

    @property
    def bytes_received(self) -> int:
        """Of all pushes so far that succeeded."""
        return self._bytes_received

    def receive(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Fill `parameters` in place with what all trainer ranks send, and pass it on.

        Returns when everything has arrived and the next engine has taken it: the checksum of what
        each parameter holds. Raises ValueError when they are not those that the links were made
        for, else the first
        failure, LinkError where a trainer rank or a worker of another engine was lost, after all
        links were closed.
        """
        kinds = _kinds(parameters)
        changed = [name for name, kind in self._kinds.items() if kinds.get(name) != kind]
        if changed:
            self.close()
            raise ValueError(f"parameters changed their shape or type: {', '.join(changed)}")
        settle(self._device)
        arrived = self._links.run([partial(stream.receive, parameters) for stream in self._streams])
        self._bytes_received += sum(stream.num_bytes for stream in self._streams)
        return self._sums(parameters, list(chain(*arrived)))

    def _sums(self, parameters: Mapping[str, Tensor], arrived: list[NamedSum]) -> dict[str, int]:
        if self._device.type != "cpu":
            return checksums(parameters)
        # Nobody sends the padding, and it is to be zero all the same.
        for name, box in self._padding:
            values = parameters[name].data
            arrived.append((name, checksum(values[box.slices], box, tuple(values.shape))))
        return added_up(arrived)

    def close(self) -> None:
        """End all links."""
        self._links.close()


def refuse_all(invitation: Invitation, reason: str, timeout: timedelta = TIMEOUT) -> None:
    """Have all who open links know at once that there will be none, and why."""
    join(invitation.meeting, timeout).refuse(reason)


def _read_plans(party: Party, worker: int) -> list[WirePlan]:
    """What each of the trainer ranks that send to a worker sends to it."""
    ranks = party.invitation.senders[worker]
    names = {f"plan/{rank}/{worker}": f"trainer rank {rank}" for rank in ranks}
    said = party.board.read(names, party.timeout)
    return [WirePlan.from_json(text) for text in said]


def _links_of(invitation: Invitation, worker: Worker) -> dict[str, str]:
    """The links from which a worker receives, by trainer rank, and who sends."""
    before = Worker(worker.engine - 1, worker.number)
    return {
        f"{worker.engine}/{rank}/{worker.number}": (
            str(before) if worker.engine else f"trainer rank {rank}"
        )
        for rank in invitation.senders[worker.number]
    }


def _links_to_next(invitation: Invitation, worker: Worker) -> dict[str, Worker]:
    """The links on which it passes on what it receives; none in the last engine."""
    after = Worker(worker.engine + 1, worker.number)
    if after.engine == invitation.num_engines:
        return {}
    ranks = invitation.senders[worker.number]
    return {f"{after.engine}/{rank}/{after.number}": after for rank in ranks}


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in parameters.items()}
