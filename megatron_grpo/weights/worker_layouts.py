"""Layouts of the weights in an engine's workers, derived from the config alone."""

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.vllm import EngineDims, engine_layouts
from megatron_grpo.config.rollout_config import RolloutConfig
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
