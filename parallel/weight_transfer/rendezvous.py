"""A board on one of the hosts, through which the two ends of a link find each other.

Anyone who reaches its port can read and change what is on it. So the key of a meeting is never
published there, and entries that were not signed with the key are rejected.

What the workers of the engines need to know to receive weights: plain data, sent as JSON.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from parallel.layout import Box
from parallel.weight_transfer.buckets import ALIGNMENT
from parallel.weight_transfer.wire import LinkError

POLL_SECONDS = 0.1
"""Interval of polling a board: the store's own wait cannot be interrupted by a refusal."""
REFUSAL = "refusal"
"""The name under which the first process that fails publishes why."""


@dataclass(frozen=True)
class Meeting:
    """The address of a board, and the secret key that signs its entries.

    One meeting serves one set of links; a retry opens another.
    """

    host: str
    port: int
    key: str


class Board:
    """Signed texts that the processes of a meeting publish for each other, by name.

    Its methods raise LinkError when the store is lost.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._key = key.encode()
        self._store = PrefixStore(hashlib.sha256(self._key).hexdigest(), store)

    def publish(self, name: str, text: str) -> None:
        """Publish `text` under `name`."""
        with _told_when_lost():
            self._store.set(name, self._seal(name, text) + text)

    def refuse(self, reason: str) -> None:
        """Tell all processes that wait here at once why there will be no links."""
        with _told_when_lost():  # compare_set keeps the first reason
            self._store.compare_set(REFUSAL, "", self._seal(REFUSAL, reason) + reason)

    @contextmanager
    def refusing(self, who: str) -> Iterator[None]:
        """Tell the others at once about a failure in the block."""
        try:
            yield
        except Exception as error:
            with suppress(LinkError):  # the original error is more useful than this one
                self.refuse(f"{who}: {error}")
            raise

    def check_refusal(self) -> None:
        """Raise LinkError if any process has refused."""
        with _told_when_lost():
            is_refused = self._store.check([REFUSAL])
        if is_refused:
            raise LinkError(self._texts([REFUSAL])[0])

    def read(self, names: Mapping[str, str], timeout: timedelta) -> list[str]:
        """Wait until everything in `names` is published; returns the texts, in order.

        The values of `names` are the publishers, named in the LinkError if one is late by
        `timeout`. Raises LinkError also when any process has refused, or if an entry was written
        without the key.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._has([*names]):
            self.check_refusal()
            if time.monotonic() > deadline:
                late = dict.fromkeys(who for name, who in names.items() if not self._has([name]))
                seconds = timeout.total_seconds()
                raise LinkError(f"no message from {', '.join(late)} within {seconds:g} s")
            time.sleep(POLL_SECONDS)
        return self._texts([*names])

    def _has(self, names: list[str]) -> bool:
        with _told_when_lost():
            return self._store.check(names)

    def _texts(self, names: list[str]) -> list[str]:
        with _told_when_lost():
            found = self._store.multi_get(names)
        return [self._unsealed(name, said) for name, said in zip(names, found, strict=True)]

    def _unsealed(self, name: str, said: bytes) -> str:
        length = 2 * hashlib.sha256().digest_size
        seal, text = said[:length], said[length:].decode(errors="replace")
        if not hmac.compare_digest(seal, self._seal(name, text).encode()):
            raise LinkError(f"{name!r} at the meeting was not signed with its key")
        return text

    def _seal(self, name: str, text: str) -> str:
        return hmac.new(self._key, f"{name}\0{text}".encode(), hashlib.sha256).hexdigest()


@contextmanager
def _told_when_lost() -> Iterator[None]:
    try:
        yield
    except DistError:
        raise LinkError("the store of the meeting is lost") from None


def open_meeting(address: str) -> tuple[Meeting, Board]:
    """Open a meeting on a free port of `address` (only), a host name or IP address of this host.

    Returns the meeting and its board, which lives as long as there are references to it. Raises
    OSError if `address` is not this host's.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.bind(place)
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    meeting = Meeting(host, port, secrets.token_hex(16))
    return meeting, Board(store, meeting.key)


def join(meeting: Meeting, timeout: timedelta) -> Board:
    """Connect to the board of a meeting; `timeout` applies to this and to each of its answers.

    Raises LinkError if it cannot be reached in that time.
    """
    try:
        store = TCPStore(meeting.host, meeting.port, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise LinkError(f"no meeting at {meeting.host} port {meeting.port}: {error}") from None
    return Board(store, meeting.key)


def local_address(meeting: Meeting) -> str:
    """This host's address on the route to the meeting; network links listen on it."""
    family, kind, _, _, place = socket.getaddrinfo(
        meeting.host, meeting.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def place(device: torch.device) -> str:
    """Identifies the memory of `device`: processes with equal values can share it.

    They are on the same boot of a host and in one network namespace, in which local links find each
    other; for CUDA, also on the same GPU and in one IPC namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot} {_namespace('net')}"
    if device.type == "cpu":
        return f"{host} cpu"
    return f"{host} {_namespace('ipc')} {torch.cuda.get_device_properties(device).uuid}"


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino


@dataclass(frozen=True)
class Invitation:
    """One set of links from trainer ranks to the workers of all engines."""

    __pydantic_config__ = ConfigDict(extra="forbid", hide_input_in_errors=True)

    meeting: Meeting
    bucket_bytes: Annotated[int, Field(gt=0, multiple_of=ALIGNMENT)]
    """Size of each of the two buffers of a link."""
    num_engines: PositiveInt
    network_only: bool
    """If set, links never share memory, even where they could."""
    senders: list[list[NonNegativeInt]]
    """By worker: the trainer ranks that send to it."""
    zeros: list[list[tuple[str, list[NonNegativeInt], list[NonNegativeInt]]]]
    """By worker: name, start and size of padding, which is not sent."""

    def to_json(self) -> dict[str, Any]:
        """The invitation as JSON-serializable data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Invitation":
        """The inverse of `to_json`; ValueError, with what is wrong, for anything else."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except (ValidationError, TypeError) as error:
            raise ValueError(f"not an invitation to receive weights: {error}") from error

    def padding(self, worker: int) -> tuple[tuple[str, Box], ...]:
        """The padding in a worker's parameters, which is not sent: (name, box)."""
        return tuple(
            (name, Box(tuple(start), tuple(size))) for name, start, size in self.zeros[worker]
        )
