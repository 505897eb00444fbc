"""The weights of an engine's first worker, of which no other holds more."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from checkpoint_convert import ModelShape
from checkpoint_convert.families.decoder import layer_prefix
from checkpoint_convert.quantized_model import QuantizedModel
from megatron_grpo.config.config import Config
from megatron_grpo.engines.layouts import first_worker, quantized_engine
from megatron_grpo.planning.card import worker_itemsizes
from megatron_grpo.planning.layer_kinds import one_of_each_kind
from parallel import Shape


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
    whole = quantized_engine(cfg.rollout, shape, cfg.model.dtype)
    quantized = _by_layer(shape, whole)
    few, layers = one_of_each_kind(shape, lambda layer: frozenset(quantized.get(layer, ())))
    counts = {layer_prefix(few, number): len(alike) for number, alike in enumerate(layers)}
    layout = first_worker(few, cfg.rollout)
    itemsizes = worker_itemsizes(cfg, few, whole and _of_few(whole, few, quantized, layers))
    sources: dict[str, str] = {}
    filled: dict[str, int] = defaultdict(int)
    for piece in layout.pieces:
        sources[piece.local] = piece.tensor
        filled[piece.local] += piece.box.num_elements
    for name, source in sources.items():
        itemsize = itemsizes[name]
        count = [count for prefix, count in counts.items() if source.startswith(prefix)]
        yield WorkerTensor(
            source=source,
            padded_bytes=prod(layout.shapes[name]) * itemsize,
            num_bytes=filled[name] * itemsize,
            num_layers=count[0] if count else 1,
        )


def _by_layer(shape: ModelShape, model: QuantizedModel | None) -> dict[int, dict[str, Shape]]:
    """The quantised weights of each layer, by their names in it."""
    found: dict[int, dict[str, Shape]] = defaultdict(dict)
    before = len(layer_prefix(shape, 0)) - len("0.")
    for name, size in model.matrices.items() if model else ():
        layer, _, own = name[before:].partition(".")
        found[int(layer)][own] = size
    return found


def _of_few(
    model: QuantizedModel,
    few: ModelShape,
    quantized: dict[int, dict[str, Shape]],
    layers: Sequence[Sequence[int]],
) -> QuantizedModel:
    """A model with the first of some `layers` that are alike, and of their quantised weights."""
    firsts = [*(alike[0] for alike in layers), sum(map(len, layers))]  # the last drafts
    matrices = {
        layer_prefix(few, number) + own: size
        for number, layer in enumerate(firsts)
        for own, size in quantized.get(layer, {}).items()
    }
    return replace(model, matrices=matrices)
