"""What each worker of an engine holds: layouts, dtypes and sizes, from the config alone."""

from collections.abc import Mapping, Sequence
from math import prod

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.megatron import hf_dtypes
from checkpoint_convert.vllm import EngineDims, engine_dtypes, engine_layouts
from megatron_grpo.config.rollout import RolloutConfig
from parallel import Layout


def engine_dims(rollout: RolloutConfig) -> EngineDims:
    """Parallel sizes of each engine."""
    return EngineDims(
        tensor=rollout.tensor_parallel_size,
        expert_parallel=bool(rollout.vllm.get("enable_expert_parallel", False)),
    )


def worker_layouts(shape: ModelShape, rollout: RolloutConfig) -> list[Layout]:
    """The layout of each worker of an engine, in rank order; the same for all engines."""
    if rollout.engine == "transformers":
        return [Layout.of_whole_tensors(hf_tensors(shape))]
    return engine_layouts(shape, engine_dims(rollout))


def worker_dtypes(shape: ModelShape, rollout: RolloutConfig, dtype: str) -> dict[str, str]:
    """The dtype of every parameter of the workers, by name, in engines of `dtype`."""
    if rollout.engine == "transformers":
        return hf_dtypes(shape, dtype, "float32")
    return engine_dtypes(shape, dtype)


def shard_bytes(workers: Sequence[Layout], itemsizes: Mapping[str, int]) -> int:
    """Bytes of the weights of an engine's fullest worker; `itemsizes` are those of `workers`."""
    return max(
        sum(itemsizes[name] * prod(size) for name, size in worker.shapes.items())
        for worker in workers
    )
