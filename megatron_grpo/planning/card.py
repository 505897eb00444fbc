"""What the planner has to know of a GPU and its network."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU of a node; rates are bytes or operations per second, by its data sheet."""

    memory: int
    """Bytes that CUDA says it has: more than the round number in its name."""
    flops: float
    """Dense bfloat16."""
    memory_rate: float
    """From its own memory."""
    node_rate: float
    """To the other GPUs of the node (NVLink), in one direction."""
    network_rate: float
    """To other nodes: of the network card that each GPU has."""
    per_node: int = 8


CARDS = {
    "a100": Card(
        memory=85 * 10**9, flops=312e12, memory_rate=2.039e12, node_rate=300e9, network_rate=25e9
    ),
    "h100": Card(
        memory=85 * 10**9, flops=989e12, memory_rate=3.35e12, node_rate=450e9, network_rate=50e9
    ),
    "h200": Card(
        memory=150 * 10**9, flops=989e12, memory_rate=4.8e12, node_rate=450e9, network_rate=50e9
    ),
    "b200": Card(
        memory=191 * 10**9, flops=2250e12, memory_rate=8e12, node_rate=900e9, network_rate=50e9
    ),
}
"""SXM modules in nodes of NVIDIA's HGX and DGX kind, one network card per GPU."""


def card_named(name: str) -> Card:
    """The card of a name in `CARDS`; ValueError with the names otherwise."""
    if name not in CARDS:
        raise ValueError(f"no GPU named {name!r} is known: --gpu is one of {', '.join(CARDS)}")
    return CARDS[name]
