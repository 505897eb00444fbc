"""One process at a meeting, where it agrees on links with others.

Every receiver publishes which memory its buffers are in. The sender of a link then chooses the best
kind of link that both support, and publishes the address at which it waits for the receiver.
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
"""Creates an end of a link from a wire, the size of a buffer in bytes, and a device."""


@dataclass(frozen=True)
class Worker:
    """One worker of one engine."""

    engine: int
    number: int

    def __str__(self) -> str:
        return f"engine {self.engine} worker {self.number}"

    @property
    def key(self) -> str:
        """The name under which it publishes which memory it is in."""
        return f"place/{self.engine}/{self.number}"


@dataclass(frozen=True)
class Party:
    """What all links of a process have in common."""

    name: str
    """The name by which error messages of other processes refer to it."""
    invitation: Invitation
    board: Board
    """The board of the invitation's meeting."""
    device: torch.device
    """The device of its links' buffers."""
    timeout: timedelta
    """How long it waits for another process."""
    _listeners: list[Listener] = field(default_factory=list, init=False)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Tell the others at once about a failure in the block; close all listeners at its end."""
        try:
            with self.board.refusing(self.name):
                yield
        finally:
            for listener in self._listeners:
                listener.close()

    def publish_place(self, worker: Worker) -> None:
        """Publish which memory this process, a receiver, is in."""
        self.board.publish(worker.key, place(self.device))

    def offer(self, links: Mapping[str, Worker]) -> list[Callable[[], Outgoing]]:
        """Offer links, by name, to their receivers.

        Returns a function for each link that waits for the receiver and returns the link. Raises
        LinkError if any process has refused, or if a receiver does not publish its place in time.
        """
        receivers = dict.fromkeys(links.values())
        places = self.board.read({worker.key: str(worker) for worker in receivers}, self.timeout)
        is_near = {
            worker: self._is_near(worker, said)
            for worker, said in zip(receivers, places, strict=True)
        }
        return [self._offer(name, worker, is_near[worker]) for name, worker in links.items()]

    def _is_near(self, worker: Worker, said: str) -> bool:
        """Whether the link to a receiver that published the place `said` shares memory."""
        here = place(self.device)
        if said == here and not self.invitation.network_only:
            return True
        if self.device.type == "cuda" and said.split()[-1] == here.split()[-1]:
            raise LinkError(
                f"{worker} and {self.name} are on one GPU, and NCCL cannot connect a GPU to "
                "itself: leave rollout.weight_transport at auto, and run both in the same network "
                "and IPC namespaces (docker: --network=host --ipc=host)"
            )
        return False

    def _offer(self, name: str, worker: Worker, is_near: bool) -> Callable[[], Outgoing]:
        key = self.invitation.meeting.key
        listener = Listener(key, None if is_near else local_address(self.invitation.meeting))
        self._listeners.append(listener)
        self.board.publish(f"link/{name}", json.dumps(listener.address))

        def accept() -> Outgoing:
            # On failure, end the wait of links that are being opened here or elsewhere.
            with self.board.refusing(self.name):
                wire = listener.accept(str(worker), self.timeout, self.board.check_refusal)
                end: Opener[Outgoing] = LocalOutgoing.open if is_near else NetworkOutgoing
                return self._open(end, wire)

        return accept

    def take(self, links: Mapping[str, str]) -> list[Callable[[], Incoming]]:
        """Take links that are offered; `links` maps their names to the senders.

        Returns a function for each link that connects to the sender and returns the link. Raises
        LinkError if any process has refused, or if a sender does not offer its link in time.
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
