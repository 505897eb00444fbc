"""Bytes that a trainer rank always holds: weights, gradients, optimizer. Exact."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

from checkpoint_convert import ModelShape, megatron_layout
from megatron_grpo.config import Config
from parallel import ParallelDims, pipeline_layers
from parallel.packing import round_up

ITEMSIZE = {"bfloat16": 2, "float32": 4}
GRADIENT_BYTES = 4
"""Gradients are summed in float32."""
MOMENTS = 2
START_MULTIPLE, BUCKET_MULTIPLE = 64, 128
"""Elements: Megatron-Core aligns parameters and buckets in the buffer of its gradients so."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Of the first rank of a pipeline stage, which none of the stage exceeds."""

    weights: int
    gradients: int
    optimizer: int
    """The shard of float32 weights (with float32 weights there is no second copy) and moments."""
    reference: int
    """Weights of the frozen model that `grpo.beta` > 0 compares with."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.reference


def state_bytes(cfg: Config, shape: ModelShape, stage: int) -> StateBytes:
    """What each rank of a pipeline stage holds from the first step to the last."""
    buckets = list(_buckets(shape, cfg.dims, stage))
    weights = sum(sum(sizes) for sizes, _ in buckets) * ITEMSIZE[cfg.model.dtype]
    gradients = owned = 0
    for sizes, num_shards in buckets:
        bucket, shard = _bucket(sizes, num_shards)
        gradients += bucket
        owned += shard
    copies = MOMENTS + (cfg.model.dtype != "float32")
    return StateBytes(
        weights=weights,
        gradients=gradients * GRADIENT_BYTES,
        optimizer=owned * copies * GRADIENT_BYTES,
        reference=weights if cfg.grpo.beta > 0 else 0,
    )


def stage_states(cfg: Config, shape: ModelShape) -> list[StateBytes]:
    """`state_bytes` of every stage. Stages with as many layers are alike, but for the ends."""
    known: dict[tuple[int, ...], StateBytes] = {}
    states = []
    for stage, chunks in enumerate(pipeline_layers(shape.num_layers, cfg.dims)):
        ends = int(chunks[0].start == 0), int(chunks[-1].stop == shape.num_layers)
        role = *ends, *map(len, chunks)
        if role not in known:
            known[role] = state_bytes(cfg, shape, stage)
        states.append(known[role])
    return states


def _buckets(shape: ModelShape, dims: ParallelDims, stage: int) -> Iterator[tuple[list[int], int]]:
    """Sizes of the parameters of each bucket, in its order, and over how many ranks it is sharded.

    Experts have buckets of their own, and so has an embedding that two stages share.
    """
    is_tied_over_stages = shape.tie_word_embeddings and dims.pipeline > 1
    buckets: dict[tuple[int, bool, bool], list[int]] = {}
    for chunk, name, size in _parameters(shape, dims, stage):
        is_shared = is_tied_over_stages and ("word_embeddings" in name or "output_layer" in name)
        buckets.setdefault((chunk, ".experts." in name, is_shared), []).append(size)
    for (_, is_expert, _), sizes in buckets.items():
        copies = dims.stage_size // (dims.expert * dims.expert_tensor)
        yield sizes[::-1], copies if is_expert else dims.data * dims.context


def _parameters(
    shape: ModelShape, dims: ParallelDims, stage: int
) -> Iterator[tuple[int, str, int]]:
    """Chunk, name and elements of what the first rank of a stage holds, in the model's order.

    Layers are alike: the layout is that of a model with one in each chunk.
    """
    shallow = replace(shape, num_layers=dims.pipeline * dims.virtual_pipeline)
    first = dims.coordinates(stage * dims.stage_size)
    # Transformer Engine names norms otherwise, and has as many elements in them.
    layout = megatron_layout(shallow, dims, first, transformer_engine=False)
    sizes = [(name, prod(size)) for name, size in layout.shapes.items()]
    for chunk, layers in enumerate(pipeline_layers(shape.num_layers, dims)[stage]):
        own = [(name, size) for name, size in sizes if name.startswith(f"{chunk}.")]
        in_layer = [".layers." in name for name, _ in own]
        begin = in_layer.index(True)
        end = begin + sum(in_layer)
        for name, size in own[:begin] + own[begin:end] * len(layers) + own[end:]:
            yield chunk, name, size


def _bucket(sizes: Iterable[int], num_shards: int) -> tuple[int, int]:
    """Elements of a bucket, padding included, and those of parameters in its first shard."""
    places, end = [], 0
    for size in sizes:
        start = round_up(end, START_MULTIPLE)
        end = start + size
        places.append((start, end))
    bucket = round_up(end, lcm(num_shards, BUCKET_MULTIPLE))
    shard = bucket // num_shards
    return bucket, sum(max(0, min(end, shard) - start) for start, end in places)
