"""The push of weights, carried out: from trainer ranks into the parameters of engine workers.

Trainer ranks send to the workers of the first engine, and worker w of each engine passes on what
arrives, bucket by bucket, to worker w of the next. Trainer ranks know what each worker needs
(`plan_sends`); a worker reads on the board of the meeting what it is going to be sent, and refuses
what does not fill its parameters exactly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from parallel.buckets import bucket_bytes_for
from parallel.invitation import Invitation
from parallel.layout import Copy
from parallel.link_set import LinkSet, opened
from parallel.links import settle
from parallel.meeting import Board, join
from parallel.party import Party, Worker
from parallel.streams import InStream, OutStream, Packing
from parallel.wire import LinkError
from parallel.wire_plan import WirePlan, check_plans

__all__ = [
    "Inbox",
    "Invitation",
    "LinkError",
    "Outbox",
    "bucket_bytes_for",
    "refuse_all",
]

TIMEOUT = timedelta(seconds=60)
"""How long a link may move nothing, and one end wait for the other to open it."""


class Outbox:
    """The links of a trainer rank. After a failure all are closed; a retry opens others."""

    def __init__(self, streams: Sequence[OutStream], device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._links = LinkSet([stream.link for stream in streams])
        self._bytes_sent = 0

    @classmethod
    def open(
        cls,
        invitation: Invitation,
        board: Board,
        rank: int,
        sends: Mapping[int, Sequence[Copy]],
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> "Outbox":
        """Publish what `rank` sends to each worker, and make the links to them.

        `board` is that of the invitation's meeting. The tensors are on `device` and travel as
        `dtype`; no copy is larger than a bucket. Raises LinkError when a worker does not come
        within `timeout`, and at once when any process of the meeting has failed; that this one has
        failed the others are told.
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
        return cls([OutStream(link, sends[w], packings[w], device) for w, link in links], device)

    @property
    def bytes_sent(self) -> int:
        """Of all pushes so far that succeeded."""
        return self._bytes_sent

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the boxes of `tensors`, by name, to all workers at the same time.

        Returns when the workers have taken everything. Raises the first failure, LinkError where a
        worker was lost, after all links were closed.
        """
        settle(self._device)
        self._links.run([partial(stream.send, tensors) for stream in self._streams])
        self._bytes_sent += sum(stream.num_bytes for stream in self._streams)

    def close(self) -> None:
        """End all links."""
        self._links.close()


class Inbox:
    """The links of an engine's worker. After a failure all are closed; a retry opens others."""

    def __init__(
        self,
        streams: Sequence[InStream],
        parameters: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._streams = streams
        self._device = device
        self._links = LinkSet([link for stream in streams for link in stream.links])
        self._parameters = parameters
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

        `parameters`, by name, are on `device`; the mapping is read anew at every push. Raises
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
            check_plans(plans, parameters, invitation.padding(worker))
            arrivals = [plan.arrivals() for plan in plans]
            packings = [
                Packing([box for _, box in boxes], plan.torch_dtype, invitation.bucket_bytes)
                for plan, boxes in zip(plans, arrivals, strict=True)
            ]
            offers = party.offer(_links_to_next(invitation, me))
            party.publish_place(me)
            links = opened(party.take(_links_of(invitation, me)))
            onward = opened(offers, links)
        streams = [
            InStream(link, passed_on, boxes, packing, device)
            for link, passed_on, boxes, packing in zip_longest(links, onward, arrivals, packings)
        ]
        return cls(streams, parameters, device)

    @property
    def bytes_received(self) -> int:
        """Of all pushes so far that succeeded."""
        return self._bytes_received

    def receive(self) -> None:
        """Fill the parameters in place with what all trainer ranks send, and pass it on.

        Returns when everything has arrived and the next engine has taken it. Raises the first
        failure, LinkError where a trainer rank or a worker of another engine was lost, after all
        links were closed.
        """
        kinds = _kinds(self._parameters)
        changed = [name for name, kind in self._kinds.items() if kinds.get(name) != kind]
        if changed:
            self.close()
            raise ValueError(f"parameters changed their shape or type: {', '.join(changed)}")
        settle(self._device)
        self._links.run([partial(stream.receive, self._parameters) for stream in self._streams])
        self._bytes_received += sum(stream.num_bytes for stream in self._streams)

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
