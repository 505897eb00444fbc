"""One rollout engine, or one node of it, for trainers that have its address and token."""

import os
from typing import NoReturn

from megatron_grpo.config.rollout_config import RolloutConfig
from megatron_grpo.config.trainer_config import ModelConfig
from megatron_grpo.rollout.access import check_host
from megatron_grpo.rollout.server import engine_command, engine_devices, num_gpus
from megatron_grpo.rollout.vllm_command import EngineNode, check_engine_arguments


def serve(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    token: str,
    node: EngineNode,
) -> NoReturn:
    """Become an engine on `host`:`port`, or a further `node` of it, whose address is `host`."""
    check_host(host)
    # vLLM's processes do not notice when those on another node end, but Slurm does.
    if node.nnodes > 1 and os.environ.get("SLURM_STEP_NUM_NODES") != str(node.nnodes):
        raise ValueError(
            f"--nnodes {node.nnodes}: an engine spans nodes only as a Slurm step over them, which "
            "the job scripts in slurm/ start; elsewhere set rollout.tensor_parallel_size to the "
            "GPUs of one host at most"
        )
    if rollout.engine == "vllm":
        check_engine_arguments(rollout.vllm)
    # vLLM takes the visible GPUs of a node for its workers there.
    size = rollout.tensor_parallel_size // node.nnodes
    part = rollout.model_copy(update={"num_engines": 1, "tensor_parallel_size": size})
    [devices] = engine_devices(part, num_gpus(), 0, os.environ)
    command, environment = engine_command(model, rollout, host, port, devices, token, node)
    os.execve(command[0], command, environment)
