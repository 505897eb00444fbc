"""Layouts of adapters on the workers of a vLLM engine (0.32, 0.33). Integers only.

An engine module that fuses weights of the files, such as qkv_proj, has an A [max rank, columns] and
a B [rows, max rank] for each. Workers split B where the module has split rows, and A where it has
split columns. Elements beyond the adapter's rank are zeros, and so are the A and B of a weight
without an adapter.
"""

from collections.abc import Collection

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.description import Parameter
from checkpoint_convert.peft import WEIGHT, a_name, b_name
from checkpoint_convert.shape import ModelShape
from checkpoint_convert.vllm import EngineDims, check_engine_dims, engine_parameters, worker_shard
from parallel import Box, Layout, Shape, ShardMapping

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of the buffers' inner dimension that vLLM can be started with."""


def max_rank_for(rank: int) -> int:
    """The smallest of `MAX_RANKS` for adapters of `rank`; ValueError if there is none."""
    if rank > MAX_RANKS[-1]:
        raise ValueError(f"vLLM serves adapters of rank {MAX_RANKS[-1]} at most, not {rank}")
    return next(each for each in MAX_RANKS if each >= rank)


def check_adapters_served(shape: ModelShape) -> None:
    """Raise ValueError if vLLM would ignore adapters of such a model, or compute them otherwise.

    Latent attention: vLLM multiplies kv_b_proj into queries and outputs instead of calling it.
    Linear attention: with adapters enabled, it has other modules. Fused weight files: all parts
    share one A.
    """
    if FAMILIES[shape.family].has_fused_weights:
        raise ValueError(
            f"engines of vLLM do not serve adapters of {shape.family} here, whose weight files "
            "have fused matrices"
        )
    kinds = {"latent attention": shape.latent, "linear attention": shape.linear}
    for kind in [kind for kind, part in kinds.items() if part is not None]:
        raise ValueError(f"engines of vLLM do not serve adapters of a model with {kind} here")


def adapted_modules(shape: ModelShape, modules: Collection[str]) -> list[str]:
    """Last parts of names, such as qkv_proj, of the engine's modules with adapters of `modules`."""
    names = (_module(each) for each in engine_parameters(shape) if _has_any(each, modules))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def adapter_layouts(
    shape: ModelShape, dims: EngineDims, modules: Collection[str], rank: int
) -> list[Layout]:
    """Layouts of adapters of `rank` on `modules` for each worker of an engine, in PEFT's tensors.

    A local name such as ``model.layers.3.self_attn.qkv_proj.lora_B.2`` is the B of the values.
    """
    return [worker_adapters(shape, dims, modules, rank, n) for n in range(dims.tensor)]


def worker_adapters(
    shape: ModelShape, dims: EngineDims, modules: Collection[str], rank: int, worker: int
) -> Layout:
    """One of the `adapter_layouts`; all workers have equally many elements."""
    check_engine_dims(shape, dims)
    modules = {*modules}
    ends = {*adapted_modules(shape, modules)}
    shapes: dict[str, Shape] = {}
    pieces: list[ShardMapping] = []
    zeros: list[tuple[str, Box]] = []
    max_rank = max_rank_for(rank)
    for parameter in engine_parameters(shape):
        if len(parameter.shape) != 2 or _module(parameter).rpartition(".")[2] not in ends:
            continue
        part = worker_shard(parameter, worker, dims.tensor)
        for number, piece in enumerate(part.pieces):
            source = piece.tensor.removesuffix(WEIGHT)
            own_rank = rank if source in modules else 0
            (rows, columns), (row, column) = piece.box.size, piece.box.start
            a, b = (f"{_module(parameter)}.lora_{x}.{number}" for x in "AB")
            shapes |= {a: (max_rank, columns), b: (rows, max_rank)}
            if own_rank:
                kept = Box((0, 0), (own_rank, columns))
                pieces.append(ShardMapping(a, kept, a_name(source), Box((0, column), kept.size)))
                kept = Box((0, 0), (rows, own_rank))
                pieces.append(ShardMapping(b, kept, b_name(source), Box((row, 0), kept.size)))
            if own_rank < max_rank:
                zeros.append((a, Box((own_rank, 0), (max_rank - own_rank, columns))))
                zeros.append((b, Box((0, own_rank), (rows, max_rank - own_rank))))
    return Layout(shapes, tuple(pieces), tuple(zeros))


def _module(parameter: Parameter) -> str:
    return parameter.name_in_engine.removesuffix(WEIGHT)


def _has_any(parameter: Parameter, modules: Collection[str]) -> bool:
    return any(source.name.removesuffix(WEIGHT) in modules for source in parameter.sources)
