"""What the workers of an engine hold, by the config alone."""

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.vllm import EngineDims, engine_layouts
from megatron_grpo.config.rollout_config import RolloutConfig
from parallel import Layout


def engine_dims(rollout: RolloutConfig) -> EngineDims:
    """Sizes of each of the engines."""
    return EngineDims(
        tensor=rollout.tensor_parallel_size,
        expert_parallel=bool(rollout.vllm.get("enable_expert_parallel", False)),
    )


def worker_layouts(shape: ModelShape, rollout: RolloutConfig) -> list[Layout]:
    """What each worker of one engine holds, in the order of ranks; all engines are alike."""
    if rollout.engine == "transformers":
        return [Layout.of_whole_tensors(hf_tensors(shape))]
    return engine_layouts(shape, engine_dims(rollout))
