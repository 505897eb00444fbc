"""The network interface of this host that reaches the other hosts of a job."""

import ipaddress
import socket
from collections.abc import MutableMapping
from pathlib import Path

from parallel.addresses import address_of

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(environ: MutableMapping[str, str], first: str) -> None:
    """Have gloo listen on the interface that routes to the job's `first` host, unless one is given.

    By itself it takes the address of the host's own name, which Debian maps to loopback. ValueError
    if `first` is such a name.
    """
    address = address_of(first)
    if ":" not in address and GLOO_VARIABLE not in environ:
        check_reachable(first)
        environ[GLOO_VARIABLE] = interface_towards(address)


def interface_towards(address: str, routes: Path = Path("/proc/net/route")) -> str:
    """Name of the interface that routes to an IPv4 address: longest prefix, then least metric."""
    # The table has addresses as numbers of the host's byte order: here, little-endian.
    target = int.from_bytes(socket.inet_aton(address), "little")
    found = []
    for line in routes.read_text(encoding="ascii").splitlines()[1:]:
        name, destination, _, _, _, _, metric, mask = line.split()[:8]
        if target & int(mask, 16) == int(destination, 16):
            found.append((int(mask, 16).bit_count(), -int(metric), name))
    is_loopback = ipaddress.ip_address(address).is_loopback  # has no row in the table
    return max(found)[-1] if found and not is_loopback else "lo"


def check_reachable(name: str) -> None:
    """Raise ValueError if this host's `name` is a loopback address, which no other host reaches."""
    address = address_of(name)
    if ipaddress.ip_address(address).is_loopback and name not in (address, "localhost"):
        raise ValueError(
            f"{name} is {address} on {socket.gethostname()} itself (/etc/hosts), where no other "
            "host reaches it: give --master-addr (MASTER_ADDR) its address in the network, one of "
            "`ip address`"
        )


def in_url(address: str) -> str:
    """An IP address as a URL has it: of IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
