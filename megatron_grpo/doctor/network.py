"""Checks of the network as /sys shows it: interfaces, InfiniBand and RoCE ports."""

import ctypes
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.doctor.finding import Finding

SECTION = "network"


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, in the kernel's words."""

    device: str
    state: str
    """Such as `4: ACTIVE`."""
    rate: str
    """Such as `400 Gb/sec (4X NDR)`."""
    link_layer: str
    """`InfiniBand`, or `Ethernet` for RoCE."""

    @property
    def is_active(self) -> bool:
        """Whether the link is up."""
        return self.state.startswith("4:")


@dataclass(frozen=True)
class Interface:
    """A network interface other than the loopback."""

    name: str
    state: str
    megabits: int
    """Per second; 0 where the kernel does not know."""
    mtu: int


def read_ports(sys: Path = Path("/sys")) -> list[Port]:
    """Every port of every InfiniBand or RoCE device."""
    ports = sorted((sys / "class" / "infiniband").glob("*/ports/*"))
    return [
        Port(port.parts[-3], *(_text(port / name) for name in ("state", "rate", "link_layer")))
        for port in ports
    ]


def read_interfaces(sys: Path = Path("/sys")) -> list[Interface]:
    """Every network interface that is not the loopback and not down."""
    interfaces = [
        Interface(folder.name, _text(folder / "operstate"), _speed(folder), _mtu(folder))
        for folder in sorted((sys / "class" / "net").iterdir())
        if folder.name != "lo" and folder.is_dir()
    ]
    return [interface for interface in interfaces if interface.state != "down"]


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds a library, as it does for NCCL."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def judge_ports(
    ports: Sequence[Port], verbs: bool, library: bool, on_gpu: bool
) -> Iterator[Finding]:
    """Findings on RDMA ports, equal ones grouped.

    `verbs`: whether /dev/infiniband exists; `library`: whether libibverbs can be loaded.
    """
    install = "apt install rdma-core ibverbs-providers"
    if not ports:
        value = "none: hosts would communicate over TCP"
        yield Finding(SECTION, "RDMA", "warning" if on_gpu else "ok", value, install)
        return
    alike = Counter((port.is_active, port.rate, _kind(port), port.state) for port in ports)
    for (active, rate, kind, state), count in sorted(alike.items(), reverse=True):
        value = f"{count} x {kind}, {rate}, {state.split(': ')[-1].lower()}"
        remedy = "" if active else "ibstat; or leave the device out with NCCL_IB_HCA"
        yield Finding(SECTION, f"RDMA {kind}", "ok" if active else "warning", value, remedy)
    if not verbs:
        value = "no /dev/infiniband: the ports cannot be used from here"
        remedy = f"mount /dev/infiniband into the container, or {install}"
        yield Finding(SECTION, "RDMA verbs", "warning", value, remedy)
    if not library:
        value = "no libibverbs.so.1: NCCL would communicate over TCP"
        yield Finding(SECTION, "RDMA library", "warning", value, install)


def judge_interfaces(interfaces: Sequence[Interface]) -> Finding:
    """All interfaces in one line, with the names that NCCL_SOCKET_IFNAME takes."""
    value = ", ".join(
        f"{one.name} ({f'{one.megabits / 1000:g} Gb/s, ' if one.megabits else ''}mtu {one.mtu})"
        for one in interfaces
    )
    return Finding(SECTION, "interfaces", "ok", value or "only the loopback")


def judge_own_name(environ: Mapping[str, str], address: str, on_gpu: bool) -> Finding:
    """Whether this host's name resolves to an outside address, where gloo listens by default."""
    if address and not address.startswith("127."):
        return Finding(SECTION, "own name", "ok", "resolves to an outside address")
    chosen = "GLOO_SOCKET_IFNAME" in environ
    return Finding(
        SECTION,
        "own name",
        "warning" if on_gpu and not chosen else "ok",
        f"resolves to this host only{', an interface is chosen' if chosen else ''}",
        "for several hosts set NETWORK_INTERFACE in slurm/env.sh, or GLOO_SOCKET_IFNAME; or fix "
        "/etc/hosts",
    )


def own_address() -> str:
    """The first IPv4 address of this host's own name; empty where it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _kind(port: Port) -> str:
    return "RoCE" if port.link_layer == "Ethernet" else port.link_layer


def _text(file: Path) -> str:
    return file.read_text().strip()


def _mtu(interface: Path) -> int:
    return int(_text(interface / "mtu"))


def _speed(interface: Path) -> int:
    """Speed in Mb/s; 0 if unknown, when the kernel returns -1 or an error."""
    try:
        return max(0, int(_text(interface / "speed")))
    except OSError:
        return 0
