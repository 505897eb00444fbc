"""Figures of GPUs and their networks, and the size of elements."""

import re
from dataclasses import dataclass, replace
from typing import Any

from checkpoint_convert import ModelShape
from checkpoint_convert.quantized.model import QuantizedModel
from megatron_grpo.config.config import Config
from megatron_grpo.doctor.gpus import PACKED_CAPABILITY
from megatron_grpo.engine_weights.layouts import worker_dtypes


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU of a node; rates are bytes or operations per second from its data sheet."""

    memory: int
    """Bytes that CUDA reports, not the round number in the GPU's name."""
    flops: float
    """Peak rate of dense bfloat16 operations."""
    fp8_flops: float | None = None
    """Rate of dense FP8 operations, if the card has them."""
    memory_rate: float
    """Rate of reading its own memory."""
    node_rate: float
    """Rate to the other GPUs of the node, in one direction."""
    node_link: str = "NVLink"
    """Name of the link to the other GPUs of the node."""
    network_rate: float
    """Rate to other nodes, by the network card of each GPU."""
    host_rate: float
    """Rate to and from the memory of its node, in one direction."""
    host_link: str = "PCIe"
    """Name of the link to the memory of its node."""
    capability: tuple[int, int]
    """Compute capability."""
    per_node: int = 8
    host_memory: int = 2 * 10**12
    """Bytes of memory of a node: what NVIDIA's DGX nodes have."""

    @property
    def packs_sequences(self) -> bool:
        """Whether cuDNN has attention over packed sequences for it."""
        return self.capability >= PACKED_CAPABILITY


_H100 = GpuSpec(
    memory=85 * 10**9,
    flops=989e12,
    fp8_flops=1979e12,
    memory_rate=3.35e12,
    node_rate=450e9,
    network_rate=50e9,
    host_rate=64e9,
    capability=(9, 0),
)
_B200 = replace(
    _H100,
    memory=191 * 10**9,
    flops=2250e12,
    fp8_flops=4500e12,
    memory_rate=8e12,
    node_rate=900e9,
    capability=(10, 0),
)
_L40S = GpuSpec(
    memory=47 * 10**9,
    flops=362.05e12,
    fp8_flops=733e12,
    memory_rate=864e9,
    node_rate=32e9,
    node_link="PCIe",
    network_rate=25e9,
    host_rate=32e9,
    capability=(8, 9),
)
CARDS = {
    "a100": GpuSpec(
        memory=85 * 10**9,
        flops=312e12,
        memory_rate=2.039e12,
        node_rate=300e9,
        network_rate=25e9,
        host_rate=32e9,
        capability=(8, 0),
    ),
    "h100": _H100,
    "h200": replace(_H100, memory=150 * 10**9, memory_rate=4.8e12),
    "b200": _B200,
    "b300": replace(_B200, memory=287 * 10**9, network_rate=100e9, capability=(10, 3)),
    # A node is a compute tray, with half of a Grace CPU for each GPU. NVLink to other trays of the
    # rack is not counted.
    "gb200": replace(
        _B200,
        memory=197 * 10**9,
        flops=2500e12,
        fp8_flops=5000e12,
        host_rate=225e9,
        host_link="NVLink-C2C",
        per_node=4,
        host_memory=960 * 10**9,
    ),
    "l40s": _L40S,
    "rtx-6000-ada": replace(_L40S, flops=364e12, fp8_flops=728e12, memory_rate=960e9),
    # The Workstation Edition. Memory of the Server Edition has 1.597 TB/s.
    "rtx-pro-6000": replace(
        _L40S,
        memory=101 * 10**9,
        flops=503.8e12,
        fp8_flops=1007.6e12,
        memory_rate=1.792e12,
        node_rate=64e9,
        host_rate=64e9,
        capability=(12, 0),
    ),
}
"""From NVIDIA's data sheets and, for the RTX cards, its whitepaper on RTX PRO Blackwell (table 4).

SXM modules in HGX and DGX nodes have one network card per GPU. Cards without NVLink have PCIe, and
200 Gb/s of network per GPU (reference architecture 2-8-5-200)."""

UNITS = {
    "GB": ("memory", 1e9),
    "TFLOPS": ("flops", 1e12),
    "GB/S": ("memory_rate", 1e9),
    "TB/S": ("memory_rate", 1e12),
}
"""Field and factor of a figure of `--gpu`, by its unit in capital letters."""
FIGURE = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})")


def card_named(name: str) -> GpuSpec:
    """The card of `--gpu`: one of `CARDS`, or figures of another, as `96GB,990TFLOPs,4TB/s`.

    What is not given is that of a card named before (`b200,180GB`), else of an h100; FP8 keeps its
    ratio to bfloat16. Raises ValueError, with the known cards, for anything else.
    """
    first, *figures = name.upper().split(",")
    card = CARDS.get(first.lower())
    changes: dict[str, Any] = {}
    for figure in figures if card else [first, *figures]:
        found = FIGURE.fullmatch(figure)
        if not found or not float(found[1]):
            raise ValueError(
                f"unknown GPU {name!r}: --gpu must be one of {', '.join(CARDS)}, or memory, peak "
                "in bfloat16 and memory rate of another, such as 96GB,990TFLOPs,4TB/s; b200,180GB "
                "is a b200 with less memory"
            )
        field, factor = UNITS[found[2]]
        changes[field] = round(float(found[1]) * factor)
    card = card or _H100
    if card.fp8_flops and "flops" in changes:
        changes["fp8_flops"] = card.fp8_flops * changes["flops"] / card.flops
    return replace(card, **changes)


ITEMSIZE = {"float8_e4m3fn": 1, "int8": 1, "bfloat16": 2, "float32": 4}


def worker_itemsizes(
    cfg: Config, shape: ModelShape, model: QuantizedModel | None
) -> dict[str, int]:
    """Bytes per element of an engine worker's weights, by name; `model`: its quantised matrices."""
    # Names of the unquantised engine: scales, a thousandth of the bytes, are not planned.
    dtypes = worker_dtypes(shape, cfg.rollout, cfg.model.dtype, model)
    names = worker_dtypes(shape, cfg.rollout, cfg.model.dtype)
    return {name: ITEMSIZE[dtypes[name]] for name in names}
