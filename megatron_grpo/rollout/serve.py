"""One rollout engine, or one node of it, for trainers that have its address and token."""

import os
import signal
import sys
from typing import NoReturn

from megatron_grpo.config.rollout_config import RolloutConfig
from megatron_grpo.config.trainer_config import ModelConfig
from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.rollout.access import check_host, is_loopback
from megatron_grpo.rollout.engine_nodes import await_end, connected
from megatron_grpo.rollout.server import engine_command, engine_devices, num_gpus
from megatron_grpo.rollout.tied_process import TiedProcess
from megatron_grpo.rollout.vllm_command import check_engine_arguments, engine_flags


def serve(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    token: str,
    node: EngineNode,
) -> NoReturn:
    """Serve on `host`:`port`, or be a further `node` of such an engine, whose address is `host`.

    An engine on one node replaces this process. One that spans nodes is watched by it: as soon as
    it ends on any node, the processes on all nodes raise EngineError.
    """
    check_host(host)
    node.check(rollout.tensor_parallel_size)
    if node.nnodes > 1 and is_loopback(host) != is_loopback(node.master_addr):
        raise ValueError(
            f"--host {host} and --master-addr {node.master_addr} do not reach each other: give "
            "the addresses of this host and of node 0 on the network that they share"
        )
    if rollout.engine == "vllm":
        check_engine_arguments(rollout.vllm)
    size, num_devices = rollout.tensor_parallel_size // node.nnodes, num_gpus()
    if num_devices == 0 and size > 1 and node.nnodes > 1:
        raise ValueError(
            f"--nnodes {node.nnodes} puts {size} workers of the engine on each node, and on CPUs "
            f"vLLM takes one: use {rollout.tensor_parallel_size}"
        )
    # vLLM takes the visible GPUs of a node for its workers there.
    part = rollout.model_copy(update={"num_engines": 1, "tensor_parallel_size": size})
    [devices] = engine_devices(part, num_devices, 0, os.environ)
    command, environment = engine_command(model, rollout, host, port, devices, token, node)
    if node.nnodes == 1:
        os.execve(command[0], command, environment)
    settings = " ".join(engine_flags(model.dtype, rollout, on_gpu=devices is not None))
    # By default SIGTERM would end this process before the block below can kill vLLM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with connected(node, token, settings, rollout.startup_timeout) as others:
        tied = TiedProcess.start(command, environment)
        try:
            await_end(tied.process, others)
        finally:
            tied.kill()
