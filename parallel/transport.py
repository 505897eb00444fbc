"""The push of weights, carried out: from trainer ranks into the parameters of engine workers.

Trainer ranks send to the workers of the first engine, and worker w of each engine passes on what
arrives, bucket by bucket, to worker w of the next. Trainer ranks know what each worker needs
(`plan_sends`); a worker reads in the store of the meeting what it is going to be sent, and refuses
what does not fill its parameters exactly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import Store

from parallel.buckets import bucket_bytes_for, bucketed
from parallel.invitation import Invitation
from parallel.layout import Copy
from parallel.link_set import LinkSet, opened
from parallel.meeting import join
from parallel.party import Party, Worker, refuse
from parallel.streams import InStream, OutStream, Packing
from parallel.wire import LinkError
from parallel.wire_plan import WirePlan, check_plans

__all__ = [
    "Inbox",
    "Invitation",
    "LinkError",
    "Outbox",
    "bucket_bytes_for",
    "bucketed",
    "refuse_all",
]

TIMEOUT = timedelta(seconds=60)
"""How long a link may move nothing, and one end wait for the other to open it."""


class Outbox:
    """The links of a trainer rank. After a failure all are closed; a retry opens others."""

    def __init__(self, streams: Sequence[OutStream]) -> None:
        self._streams = streams
        self._links = LinkSet([stream.link for stream in streams])
        self._bytes_sent = 0

    @classmethod
    def open(
        cls,
        invitation: Invitation,
        store: Store,
        rank: int,
        sends: Mapping[int, Sequence[Copy]],
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta = TIMEOUT,
    ) -> "Outbox":
        """Publish what `rank` sends to each worker, and make the links to them.

        `store` is that of the invitation's meeting. The tensors are on `device` and travel as
        `dtype`; no copy is larger than a bucket. Raises LinkError when a worker does not come
        within `timeout`.
        """
        workers = [worker for worker, ranks in enumerate(invitation.senders) if rank in ranks]
        assert sorted(sends) == workers, f"rank {rank} sends to {sorted(sends)}, not {workers}"
        packings = {
            worker: Packing(
                [copy.destination_box for copy in copies], dtype, invitation.bucket_bytes
            )
            for worker, copies in sends.items()
        }
        for worker, copies in sends.items():
            store.set(f"plan/{rank}/{worker}", WirePlan.of(copies, dtype).to_json())
        party = Party(invitation, store, device, timeout)
        offers = party.offer({f"0/{rank}/{worker}": Worker(0, worker) for worker in workers})
        links = zip(workers, opened(offers), strict=True)
        return cls([OutStream(link, sends[w], packings[w], device) for w, link in links])

    @property
    def bytes_sent(self) -> int:
        """Of all pushes so far that succeeded."""
        return self._bytes_sent

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the boxes of `tensors`, by name, to all workers at the same time.

        Returns when the workers have taken everything. Raises the first failure, LinkError where a
        worker was lost, after all links were closed.
        """
        self._links.run([partial(stream.send, tensors) for stream in self._streams])
        self._bytes_sent += sum(stream.num_bytes for stream in self._streams)

    def close(self) -> None:
        """End all links."""
        self._links.close()


class Inbox:
    """The links of an engine's worker. After a failure all are closed; a retry opens others."""

    def __init__(self, streams: Sequence[InStream], parameters: Mapping[str, Tensor]) -> None:
        self._streams = streams
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
        LinkError when a trainer rank or a worker of the next engine does not come within `timeout`.
        """
        party = Party(invitation, join(invitation.meeting, timeout), device, timeout)
        me = Worker(engine, worker)
        with party.refusing(me):
            plans = _read_plans(party, worker)
            check_plans(plans, parameters, invitation.padding(worker))
            offers = party.offer(_links_to_next(party, me))
        party.publish_place(me)
        links = opened(party.take(_links_of(party, me)))
        onward = opened(offers, links)
        arrivals = [plan.arrivals() for plan in plans]
        packings = [
            Packing([box for _, box in boxes], plan.torch_dtype, invitation.bucket_bytes)
            for plan, boxes in zip(plans, arrivals, strict=True)
        ]
        streams = [
            InStream(link, passed_on, boxes, packing, device)
            for link, passed_on, boxes, packing in zip_longest(links, onward, arrivals, packings)
        ]
        return cls(streams, parameters)

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
        self._links.run([partial(stream.receive, self._parameters) for stream in self._streams])
        self._bytes_received += sum(stream.num_bytes for stream in self._streams)

    def close(self) -> None:
        """End all links."""
        self._links.close()


def refuse_all(invitation: Invitation, reason: str, timeout: timedelta = TIMEOUT) -> None:
    """Have the trainer ranks know at once that no worker comes: its engine cannot be reached."""
    store = join(invitation.meeting, timeout)  # another's waits hold up what is said through it
    for engine in range(invitation.num_engines):
        for worker in range(len(invitation.senders)):
            refuse(store, Worker(engine, worker), reason)


def _read_plans(party: Party, worker: int) -> list[WirePlan]:
    """What each of the trainer ranks that send to a worker sends to it."""
    ranks = party.invitation.senders[worker]
    said = party.read({f"plan/{rank}/{worker}": f"trainer rank {rank}" for rank in ranks})
    return [WirePlan.from_json(text) for text in said]


def _links_of(party: Party, worker: Worker) -> dict[str, str]:
    """The links from which a worker receives, by trainer rank, and who sends."""
    before = Worker(worker.engine - 1, worker.number)
    return {
        f"{worker.engine}/{rank}/{worker.number}": (
            str(before) if worker.engine else f"trainer rank {rank}"
        )
        for rank in party.invitation.senders[worker.number]
    }


def _links_to_next(party: Party, worker: Worker) -> dict[str, Worker]:
    """The links on which it passes on what it receives; none in the last engine."""
    after = Worker(worker.engine + 1, worker.number)
    if after.engine == party.invitation.num_engines:
        return {}
    ranks = party.invitation.senders[worker.number]
    return {f"{after.engine}/{rank}/{after.number}": after for rank in ranks}


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in parameters.items()}
