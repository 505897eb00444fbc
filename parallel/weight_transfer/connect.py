"""One process at a meeting, where it agrees on links with others.

Every receiver publishes which memory its buffers are in. The sender of a link then chooses the best
kind of link that both support, and publishes the address at which it waits for the receiver.

All links of a process: opened together, used together, and all closed when one fails.

What one trainer rank sends to one worker: validated JSON in a meeting's store, not pickles.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from parallel.layout import Box, Copy, Layout
from parallel.reshard import check_arrivals
from parallel.weight_transfer.links import Incoming, Link, Outgoing
from parallel.weight_transfer.listener import Address, Listener, connect
from parallel.weight_transfer.local_links import LocalIncoming, LocalOutgoing
from parallel.weight_transfer.network_links import NetworkIncoming, NetworkOutgoing
from parallel.weight_transfer.rendezvous import Board, Invitation, local_address, place
from parallel.weight_transfer.wire import LinkError, Wire

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


T = TypeVar("T")


def opened(calls: Sequence[Callable[[], L]]) -> list[L]:
    """The links that these calls open, all at the same time.

    When one fails, the links that were opened are closed.
    """
    made: list[Link] = []

    def noted(call: Callable[[], L]) -> L:
        link = call()
        made.append(link)
        return link

    try:
        return at_once([partial(noted, call) for call in calls], abort=lambda: None)
    except BaseException:
        with suppress(Exception):  # the first failure says more
            _close_all(made)
        raise


class LinkSet:
    """The open links of a process."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._is_closed = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of `jobs` in its own thread; returns their results.

        When one fails, aborts the others, closes all links, and raises the first error.
        """
        if self._is_closed:
            raise LinkError("the links were closed, by a failure or by this process")
        try:
            return at_once(jobs, self._abort)
        except BaseException:
            with suppress(Exception):  # the first failure says more
                self.close()
            raise

    def close(self) -> None:
        """Close all links, even if closing one fails; call it while no job is running."""
        if not self._is_closed:
            self._is_closed = True
            _close_all(self._links)

    def _abort(self) -> None:
        for link in self._links:
            link.abort()


def _close_all(links: Sequence[Link]) -> None:
    with ExitStack() as stack:
        for link in reversed(links):
            stack.callback(link.close)


def at_once(jobs: Sequence[Callable[[], T]], abort: Callable[[], None]) -> list[T]:
    """Run each of `jobs` in its own thread; returns their results.

    When one fails, calls `abort`, which must end the others, and raises the first error when all
    have ended.
    """
    failures: list[BaseException] = []

    def run(job: Callable[[], T]) -> T:
        try:
            return job()
        except BaseException as error:
            failures.append(error)
            abort()
            raise

    if not jobs:
        return []
    with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            wait(futures)
        except BaseException:  # such as the user's interrupt
            abort()
            raise
    if failures:
        first = failures[0]
        # The traceback of an error references the links' buffers. Do not keep a reference cycle to
        # it here, or they would stay allocated until the next garbage collection.
        failures.clear()
        futures.clear()
        try:
            raise first
        finally:
            del first
    return [future.result() for future in futures]


@dataclass(frozen=True)
class WirePlan:
    """The boxes of a worker's parameters that arrive from one rank, in order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    names: list[str]
    dtypes: list[str]
    """For each of `names`, the dtype in which its elements are sent, as torch names it, such as
    "bfloat16"."""
    boxes: list[list[NonNegativeInt]]
    """Number in `names`, then start and size along each dimension."""

    @classmethod
    def of(cls, copies: Sequence[Copy], dtypes: Mapping[str, torch.dtype]) -> "WirePlan":
        """The plan of a rank's copies to one worker; `dtypes` are those of its parameters."""
        numbers: dict[str, int] = {}
        boxes = []
        for copy in copies:
            number = numbers.setdefault(copy.destination, len(numbers))
            boxes.append([number, *copy.destination_box.start, *copy.destination_box.size])
        names = [str(dtypes[name]).removeprefix("torch.") for name in numbers]
        return cls(list(numbers), names, boxes)

    @classmethod
    def from_json(cls, text: str | bytes) -> "WirePlan":
        """The inverse of `to_json`; ValueError, with what is wrong, for anything else."""
        try:
            plan = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(f"not a plan of arriving weights: {error}") from error
        for name in plan.dtypes:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"not a plan of arriving weights: {name!r} is not a dtype")
        if len(plan.dtypes) != len(plan.names):
            raise ValueError(
                f"not a plan of arriving weights: {len(plan.dtypes)} dtypes of "
                f"{len(plan.names)} parameters"
            )
        for box in plan.boxes:
            if len(box) < 3 or not len(box) % 2 or box[0] >= len(plan.names):
                raise ValueError(f"not a plan of arriving weights: {box} is not a box")
        return plan

    @property
    def torch_dtypes(self) -> list[torch.dtype]:
        """The dtype in which the elements of each of `boxes` are sent."""
        return [getattr(torch, self.dtypes[number]) for number, *_ in self.boxes]

    def to_json(self) -> str:
        """The plan as JSON text, as published in the store."""
        return TypeAdapter(WirePlan).dump_json(self).decode()

    def arrivals(self) -> list[tuple[str, Box]]:
        """The boxes in order, each with the name of its parameter."""
        return [
            (self.names[number], Box(tuple(ends[: len(ends) // 2]), tuple(ends[len(ends) // 2 :])))
            for number, *ends in self.boxes
        ]


def check_plans(
    plans: Sequence[WirePlan], parameters: Mapping[str, Tensor], zeros: tuple[tuple[str, Box], ...]
) -> None:
    """Raise ValueError, naming every parameter at fault, unless all plans together fit a worker.

    Every element of `parameters` must arrive exactly once, in the dtype of the parameter, except
    for the padding `zeros`, which must not arrive.
    """
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    arrivals = [arrival for plan in plans for arrival in plan.arrivals()]
    faults = {
        f"{name} is {parameters[name].dtype}, and arrives as torch.{dtype}": None
        for plan in plans
        for name, dtype in zip(plan.names, plan.dtypes, strict=True)
        if name in parameters and str(parameters[name].dtype) != f"torch.{dtype}"
    }
    for name, box in (*arrivals, *zeros):
        if name in shapes and len(box.start) != len(shapes[name]):
            faults[f"{name}: {box} is not a box of its shape {shapes[name]}"] = None
    if faults:
        raise ValueError("the weights do not fit the parameters:\n  " + "\n  ".join(faults))
    check_arrivals(
        Layout(shapes, (), zeros), [Copy(name, box, name, box) for name, box in arrivals]
    )
