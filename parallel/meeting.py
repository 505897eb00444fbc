"""Where the two ends of a link find each other: a small store on one of the hosts.

Who does not know the key of a meeting finds nothing in its store, and changes nothing of ours. The
store is to stay open for as long as the links do: NCCL looks into it late.
"""

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from parallel.wire import LinkError


@dataclass(frozen=True)
class Meeting:
    """The address of a store and the secret under which a set of links is agreed on in it.

    One meeting serves one set of links; a retry opens another.
    """

    host: str
    port: int
    key: str


def open_meeting(address: str) -> tuple[Meeting, Store]:
    """Open a store on a free port of exactly `address`, a name or number of this host.

    Returns the meeting and the store, which ends when the last reference to it goes. Raises OSError
    where `address` is not this host's.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.bind(place)
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    meeting = Meeting(host, port, secrets.token_hex(16))
    return meeting, PrefixStore(meeting.key, store)


def join(meeting: Meeting, timeout: timedelta) -> Store:
    """The store of a meeting, each of whose answers is waited for `timeout` at most.

    Raises LinkError when it cannot be reached in that time.
    """
    try:
        store = TCPStore(meeting.host, meeting.port, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise LinkError(f"no store at {meeting.host} port {meeting.port}: {error}") from error
    return PrefixStore(meeting.key, store)


def local_address(meeting: Meeting) -> str:
    """The address of this host from which it reaches the meeting's; network links listen on it."""
    family, kind, _, _, place = socket.getaddrinfo(
        meeting.host, meeting.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def place(device: torch.device) -> str:
    """Which memory `device` means: two processes that say the same can share it.

    They are on the same boot of a host and in one network namespace, in which local links find each
    other; for CUDA, on the same GPU and in one namespace of inter-process communication.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot} {_namespace('net')}"
    if device.type == "cpu":
        return f"{host} cpu"
    return f"{host} {_namespace('ipc')} {torch.cuda.get_device_properties(device).uuid}"


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino
