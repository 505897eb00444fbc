"""Figures of GPUs and their networks, and the size of elements."""

from dataclasses import dataclass, replace

from checkpoint_convert import ModelShape
from checkpoint_convert.quantized.model import QuantizedModel
from megatron_grpo.config.config import Config
from megatron_grpo.doctor.gpus import PACKED_CAPABILITY
from megatron_grpo.engine_weights.layouts import worker_dtypes


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU of a node; rates are bytes or operations per second from its data sheet."""

    memory: int
    """Bytes that CUDA reports, which is more than the round number in the GPU's name."""
    flops: float
    """Peak rate of dense bfloat16 operations."""
    fp8_flops: float | None = None
    """Rate of dense FP8 operations, if the card has them."""
    memory_rate: float
    """Rate of reading its own memory."""
    node_rate: float
    """Rate to the other GPUs of the node (NVLink), in one direction."""
    network_rate: float
    """Rate to other nodes, by the network card of each GPU."""
    host_rate: float
    """Rate to and from the memory of its node (PCIe), in one direction."""
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
    "b200": replace(
        _H100,
        memory=191 * 10**9,
        flops=2250e12,
        fp8_flops=4500e12,
        memory_rate=8e12,
        node_rate=900e9,
        capability=(10, 0),
    ),
}
"""SXM modules in NVIDIA HGX and DGX nodes, with one network card per GPU."""


def card_named(name: str) -> GpuSpec:
    """The card `name` of `CARDS`; ValueError that lists the known names otherwise."""
    if name not in CARDS:
        raise ValueError(f"unknown GPU {name!r}: --gpu must be one of {', '.join(CARDS)}")
    return CARDS[name]


ITEMSIZE = {"float8_e4m3fn": 1, "int8": 1, "bfloat16": 2, "float32": 4}


def worker_itemsizes(
    cfg: Config, shape: ModelShape, model: QuantizedModel | None
) -> dict[str, int]:
    """Bytes per element of an engine worker's weights, by name; `model`: its quantised matrices."""
    # Names of the unquantised engine: scales, a thousandth of the bytes, are not planned.
    dtypes = worker_dtypes(shape, cfg.rollout, cfg.model.dtype, model)
    names = worker_dtypes(shape, cfg.rollout, cfg.model.dtype)
    return {name: ITEMSIZE[dtypes[name]] for name in names}
