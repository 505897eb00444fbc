"""The weights of an engine's first worker, of which no other holds more."""

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from checkpoint_convert import ModelShape
from checkpoint_convert.families.decoder import layer_prefix
from megatron_grpo.config.config import Config
from megatron_grpo.engines.layouts import first_worker, quantized_engine
from megatron_grpo.planning.card import worker_itemsizes
from megatron_grpo.planning.layer_kinds import one_of_each_kind


class WorkerTensor(NamedTuple):
    """One of the worker's, for all layers of a kind."""

    source: str
    """A tensor of the weight files of which it has a part."""
    padded_bytes: int
    num_bytes: int
    """Without padding."""
    num_layers: int
    """How many have it; 1 outside of layers."""


def worker_tensors(cfg: Config, shape: ModelShape) -> Iterator[WorkerTensor]:
    """What the worker holds, without scales of quantised weights.

    Raises ValueError if an engine cannot split the model, or not if its weights are quantised.
    """
    few, counts = one_of_each_kind(shape)
    layout = first_worker(few, cfg.rollout)
    quantized_engine(cfg.rollout, shape, cfg.model.dtype)  # a refusal names weights of all layers
    itemsizes = worker_itemsizes(cfg, few)
    sources: dict[str, str] = {}
    filled: dict[str, int] = defaultdict(int)
    for piece in layout.pieces:
        sources[piece.local] = piece.tensor
        filled[piece.local] += piece.box.num_elements
    for name, source in sources.items():
        itemsize, layers = itemsizes[name], (layer_prefix(few, i) for i in range(few.num_layers))
        count = [n for n, layer in zip(counts, layers, strict=True) if source.startswith(layer)]
        yield WorkerTensor(
            source=source,
            padded_bytes=prod(layout.shapes[name]) * itemsize,
            num_bytes=filled[name] * itemsize,
            num_layers=count[0] if count else 1,
        )
