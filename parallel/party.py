"""One process at a meeting, where it agrees on links with others.

Every receiver publishes which memory it is in. The sender of a link then offers the best way that
both have, and publishes where it waits for the receiver.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import DistNetworkError, DistStoreError, Store

from parallel.invitation import Invitation
from parallel.links import Incoming, Outgoing
from parallel.listener import Address, Listener, connect
from parallel.local_links import LocalIncoming, LocalOutgoing
from parallel.meeting import local_address, place
from parallel.network_links import NetworkIncoming, NetworkOutgoing
from parallel.wire import LinkError

REFUSAL = "refused: "
"""What a worker publishes in place of its memory, before the reason why it makes no link."""


@dataclass(frozen=True)
class Worker:
    """One worker of one engine."""

    engine: int
    number: int

    def __str__(self) -> str:
        return f"engine {self.engine} worker {self.number}"

    @property
    def key(self) -> str:
        """Under which it publishes which memory it is in."""
        return f"place/{self.engine}/{self.number}"


def refuse(store: Store, worker: Worker, reason: str) -> None:
    """Have those who wait for `worker` at a meeting know at once that it does not come."""
    store.set(worker.key, REFUSAL + reason)


@dataclass(frozen=True)
class Party:
    """What a process brings to all its links."""

    invitation: Invitation
    store: Store
    """Of the meeting."""
    device: torch.device
    """Where the buffers of its links are."""
    timeout: timedelta
    """How long it waits for another."""

    def read(self, keys: Mapping[str, str]) -> list[bytes]:
        """What others publish under `keys`, in order; the values say who, for the LinkError."""
        names = list(keys)
        try:
            self.store.wait(names, self.timeout)
            return self.store.multi_get(names)
        except DistNetworkError as error:
            raise LinkError(f"the store of the meeting is lost: {error}") from error
        except DistStoreError as error:
            late = dict.fromkeys(who for name, who in keys.items() if not self.store.check([name]))
            seconds = self.timeout.total_seconds()
            raise LinkError(f"no word of {', '.join(late)} within {seconds:g} s") from error

    def publish_place(self, worker: Worker) -> None:
        """Say which memory this process, a receiver, is in."""
        self.store.set(worker.key, place(self.device))

    @contextmanager
    def refusing(self, worker: Worker) -> Iterator[None]:
        """Have those who wait for the place of `worker` know at once of what fails in the block."""
        try:
            yield
        except (ValueError, OSError) as error:
            refuse(self.store, worker, str(error))
            raise

    def offer(self, links: Mapping[str, Worker]) -> list[Callable[[], Outgoing]]:
        """Offer links, by name, to their receivers.

        Returns for each what waits for the receiver and then is the link. Raises LinkError when a
        receiver has refused, or has not said where it is within the time-out.
        """
        receivers = dict.fromkeys(links.values())
        places = self.read({worker.key: str(worker) for worker in receivers})
        for worker, said in zip(receivers, places, strict=True):
            if said.decode().startswith(REFUSAL):
                raise LinkError(f"{worker}: {said.decode().removeprefix(REFUSAL)}")
        is_near = {
            worker: not self.invitation.network_only and said.decode() == place(self.device)
            for worker, said in zip(receivers, places, strict=True)
        }
        return [self._offer(name, worker, is_near[worker]) for name, worker in links.items()]

    def _offer(self, name: str, worker: Worker, is_near: bool) -> Callable[[], Outgoing]:
        key = self.invitation.meeting.key
        listener = Listener(key, None if is_near else local_address(self.invitation.meeting))
        self.store.set(f"link/{name}", json.dumps(listener.address))

        def accept() -> Outgoing:
            wire = listener.accept(str(worker), self.timeout)
            end = LocalOutgoing.open if is_near else NetworkOutgoing
            return end(wire, self.invitation.bucket_bytes, self.device)

        return accept

    def take(self, links: Mapping[str, str]) -> list[Callable[[], Incoming]]:
        """Take the links, by name, that are offered; the values say by whom.

        Returns for each what connects to the sender and then is the link. Raises LinkError when a
        sender has not offered it within the time-out.
        """
        offers = self.read({f"link/{name}": peer for name, peer in links.items()})
        return [
            partial(self._take, json.loads(offer), peer)
            for offer, peer in zip(offers, links.values(), strict=True)
        ]

    def _take(self, address: Address, peer: str) -> Incoming:
        wire = connect(address, self.invitation.meeting.key, peer, self.timeout)
        end = LocalIncoming.open if isinstance(address, str) else NetworkIncoming
        return end(wire, self.invitation.bucket_bytes, self.device)
