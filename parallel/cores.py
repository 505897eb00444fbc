"""The cores of a host that a rank runs on."""

import os
from pathlib import Path
from typing import Any

import torch


def run_near(device: torch.device) -> None:
    """Keep this thread, and threads and processes that it starts later, on the cores at its GPU.

    The kernel would move it between sockets, which makes launches of kernels slower.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks its address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    if cores := cores_at(address) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)


def cores_at(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores of the NUMA node that a PCI device is at; empty if the kernel does not tell."""
    file = devices / address / "local_cpulist"
    if not file.exists():
        return set()
    cores: set[int] = set()
    for part in filter(None, file.read_text().strip().split(",")):  # such as 0-3,8-11
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
