"""One process at a meeting, where it agrees on links with others.

Every receiver publishes which memory it is in. The sender of a link then offers the best way that
both have, and publishes where it waits for the receiver.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch

from parallel.transport.invitation import Invitation
from parallel.transport.links import Incoming, Link, Outgoing
from parallel.transport.listener import Address, Listener, connect
from parallel.transport.local_links import LocalIncoming, LocalOutgoing
from parallel.transport.meeting import Board, local_address, place
from parallel.transport.network_links import NetworkIncoming, NetworkOutgoing
from parallel.transport.wire import LinkError, Wire

L = TypeVar("L", bound=Link)
Opener = Callable[[Wire, int, torch.device], L]
"""Makes an end of a link over a wire, with buffers of so many bytes on a device."""


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


@dataclass(frozen=True)
class Party:
    """What a process brings to all its links."""

    name: str
    """As the others know it."""
    invitation: Invitation
    board: Board
    """Of the meeting."""
    device: torch.device
    """Where the buffers of its links are."""
    timeout: timedelta
    """How long it waits for another."""
    _listeners: list[Listener] = field(default_factory=list, init=False)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Have the others know at once of what fails in the block; whom it offered links, too."""
        try:
            with self.board.refusing(self.name):
                yield
        finally:
            for listener in self._listeners:
                listener.close()

    def publish_place(self, worker: Worker) -> None:
        """Say which memory this process, a receiver, is in."""
        self.board.publish(worker.key, place(self.device))

    def offer(self, links: Mapping[str, Worker]) -> list[Callable[[], Outgoing]]:
        """Offer links, by name, to their receivers.

        Returns for each what waits for the receiver and then is the link. Raises LinkError when
        somebody has refused, or a receiver has not said where it is within the time-out.
        """
        receivers = dict.fromkeys(links.values())
        places = self.board.read({worker.key: str(worker) for worker in receivers}, self.timeout)
        is_near = {
            worker: self._is_near(worker, said)
            for worker, said in zip(receivers, places, strict=True)
        }
        return [self._offer(name, worker, is_near[worker]) for name, worker in links.items()]

    def _is_near(self, worker: Worker, said: str) -> bool:
        """Whether a receiver that says to be there is to share memory with this process."""
        here = place(self.device)
        if said == here and not self.invitation.network_only:
            return True
        if self.device.type == "cuda" and said.split()[-1] == here.split()[-1]:
            raise LinkError(
                f"{worker} and {self.name} are on one GPU, and NCCL does not go from a GPU to "
                "itself: leave rollout.weight_transport at auto, and give both one namespace of "
                "network and of inter-process communication (docker: --network=host --ipc=host)"
            )
        return False

    def _offer(self, name: str, worker: Worker, is_near: bool) -> Callable[[], Outgoing]:
        key = self.invitation.meeting.key
        listener = Listener(key, None if is_near else local_address(self.invitation.meeting))
        self._listeners.append(listener)
        self.board.publish(f"link/{name}", json.dumps(listener.address))

        def accept() -> Outgoing:
            # Others that are opened at the same time, here or elsewhere, are not to wait in vain.
            with self.board.refusing(self.name):
                wire = listener.accept(str(worker), self.timeout, self.board.check_refusal)
                end: Opener[Outgoing] = LocalOutgoing.open if is_near else NetworkOutgoing
                return self._open(end, wire)

        return accept

    def take(self, links: Mapping[str, str]) -> list[Callable[[], Incoming]]:
        """Take the links, by name, that are offered; the values say by whom.

        Returns for each what connects to the sender and then is the link. Raises LinkError when
        somebody has refused, or a sender has not offered it within the time-out.
        """
        names = {f"link/{name}": peer for name, peer in links.items()}
        offers = self.board.read(names, self.timeout)
        return [
            partial(self._take, json.loads(offer), peer)
            for offer, peer in zip(offers, links.values(), strict=True)
        ]

    def _take(self, address: Address, peer: str) -> Incoming:
        with self.board.refusing(self.name):
            wire = connect(address, self.invitation.meeting.key, peer, self.timeout)
            is_near = isinstance(address, str)
            end: Opener[Incoming] = LocalIncoming.open if is_near else NetworkIncoming
            return self._open(end, wire)

    def _open(self, end: Opener[L], wire: Wire) -> L:
        try:
            return end(wire, self.invitation.bucket_bytes, self.device)
        except BaseException:
            wire.close()
            raise
