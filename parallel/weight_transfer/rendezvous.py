"""Rendezvous of the two ends of a channel, through a TCPStore on rank 0's host.

The store asks for no token: whoever reaches it can read and change its texts. Engine workers
receive its address by HTTP, with a token, and with it the secret by which a sender knows its
receiver.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.distributed import DistError, Store, TCPStore

from parallel.addresses import address_of
from parallel.clock import running_time
from parallel.layout import Box
from parallel.store import serve_store
from parallel.weight_transfer.channels import ChannelError
from parallel.weight_transfer.streams import ALIGNMENT

POLL_SECONDS = 0.1
"""Interval of polling the store, whose own wait cannot be interrupted by a failure elsewhere."""
FAILURE = "failure"
"""The key under which the first process that fails publishes why."""


@dataclass(frozen=True)
class RendezvousAddress:
    """Address of the store for one set of channels; a retry opens another."""

    host: str
    port: int
    secret: str = field(default="", repr=False)
    """Known to the processes at both ends of the channels alone; it is not in the store."""


class Rendezvous:
    """Texts by key, which processes at both ends of a set of channels publish for each other.

    Methods raise ChannelError when the store is lost.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, key: str, text: str) -> None:
        self._ask(self._store.set, key, text)

    def publish_failure(self, reason: str) -> None:
        """Publish why there will be no channels; waiting processes raise it at once."""
        self._ask(self._store.compare_set, FAILURE, "", reason)  # keeps the first reason

    @contextmanager
    def publishing_failures(self, who: str) -> Iterator[None]:
        """Publish an error of the block, as a failure of process `who`."""
        try:
            yield
        except Exception as error:
            with suppress(ChannelError):  # the original error is more useful than this one
                self.publish_failure(f"{who}: {error}")
            raise

    def check_failure(self) -> None:
        """Raise ChannelError if any process has failed."""
        if self._has([FAILURE]):
            raise ChannelError(self._texts([FAILURE])[0])

    def await_texts(self, keys: Mapping[str, str], timeout: timedelta) -> list[str]:
        """Wait until all `keys` are published; returns the texts, in order.

        The values of `keys` are the publishers, named in the ChannelError if one is late by
        `timeout`. Raises ChannelError also when any process has failed.
        """
        deadline = running_time() + timeout.total_seconds()
        while not self._has([*keys]):
            self.check_failure()
            if running_time() > deadline:
                late = dict.fromkeys(who for key, who in keys.items() if not self._has([key]))
                seconds = timeout.total_seconds()
                raise ChannelError(f"no message from {', '.join(late)} within {seconds:g} s")
            time.sleep(POLL_SECONDS)
        return self._texts([*keys])

    def _has(self, keys: list[str]) -> bool:
        return self._ask(self._store.check, keys)

    def _texts(self, keys: list[str]) -> list[str]:
        return [text.decode() for text in self._ask(self._store.multi_get, keys)]

    def _ask[T](self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return call(*arguments)
        except DistError:
            raise ChannelError("the store of the rendezvous is lost") from None


def open_rendezvous(address: str) -> tuple[RendezvousAddress, Rendezvous]:
    """Open a store on a free port of `address` (only), a host name or IP address of this host.

    The store lives as long as the Rendezvous is referenced. Raises OSError if `address` is not this
    host's.
    """
    store = serve_store(address)
    return RendezvousAddress(store.host, store.port, secrets.token_hex(32)), Rendezvous(store)


def join(address: RendezvousAddress, timeout: timedelta) -> Rendezvous:
    """Connect to a rendezvous; `timeout` is for the connection, and for each answer of the store.

    Raises ChannelError if it cannot be reached in that time.
    """
    try:
        return Rendezvous(
            TCPStore(address.host, address.port, wait_for_workers=False, timeout=timeout)
        )
    except DistError as error:
        raise ChannelError(
            f"no rendezvous at {address.host} port {address.port}: {error}"
        ) from None


def local_address(peer: RendezvousAddress) -> str:
    """This host's address on the route to `peer`; network channels listen on it."""
    family, kind, _, _, place = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # UDP: selects a route, sends nothing
        address: str = probe.getsockname()[0]
        return address


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def rendezvous_address(base_urls: Sequence[str], num_hosts: int, environ: Mapping[str, str]) -> str:
    """Address of rank 0's host at which ranks and workers meet.

    With ranks on several hosts: MASTER_ADDR, where the ranks have already met. With ranks on one
    host: loopback if all engines are local, else this host's address on the route to a remote one.
    """
    if num_hosts > 1:
        return address_of(environ["MASTER_ADDR"])
    hosts = [urlsplit(url).hostname or "" for url in base_urls]
    remote = [host for host in hosts if host not in LOOPBACK]
    return local_address(RendezvousAddress(remote[0], port=1)) if remote else "127.0.0.1"


def memory_domain(device: torch.device) -> str:
    """Identifies the memory of `device`: processes with equal values can share it.

    Equal values mean the same boot of a host and the same network namespace, where abstract Unix
    sockets are visible; for CUDA, also the same GPU, IPC namespace and PID namespace, without which
    the driver opens no handle of another process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    host = f"{boot} {_namespace('net')}"
    if device.type == "cpu":
        return f"{host} cpu"
    others = f"{_namespace('ipc')} {_namespace('pid')}"
    return f"{host} {others} {torch.cuda.get_device_properties(device).uuid}"


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino


@dataclass(frozen=True)
class TransferInitInfo:
    """Data that the workers of all engines need to open their channels, sent as JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid", hide_input_in_errors=True)

    rendezvous: RendezvousAddress
    bucket_bytes: Annotated[int, Field(gt=0, multiple_of=ALIGNMENT)]
    """Size of each of the two buffers of a channel."""
    num_engines: PositiveInt
    network_only: bool
    """Forbids shared memory, even where both ends could use it."""
    senders: list[list[NonNegativeInt]]
    """Trainer ranks that send to each worker."""
    zeros: list[list[tuple[str, list[NonNegativeInt], list[NonNegativeInt]]]]
    """Padding of each worker, which is not sent: name, start and size."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "TransferInitInfo":
        """Inverse of `to_json`; ValueError, naming the fault, for any other data."""
        try:
            # As JSON: in strict mode, Python lists are no tuples.
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except (ValidationError, TypeError) as error:
            raise ValueError(f"no description of a weight transfer: {error}") from error

    def padding(self, worker: int) -> tuple[tuple[str, Box], ...]:
        """Padding (name, box) in a worker's parameters, which is not sent."""
        return tuple(
            (name, Box(tuple(start), tuple(size))) for name, start, size in self.zeros[worker]
        )
