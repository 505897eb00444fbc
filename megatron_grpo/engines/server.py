"""Rollout engines as processes of this host: their devices, commands and environment.

`megatron-grpo serve` runs one for trainers that have its address and token.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine_dims
from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.layouts import engine_dims
from megatron_grpo.engines.access import check_host
from megatron_grpo.engines.arguments import ONE_NODE, PLANNED, EngineNode, engine_table
from megatron_grpo.engines.joining import FOLDER, JoinedEngine, refusal, serve_joined, settings_of
from megatron_grpo.engines.processes import LOOPBACK, ServerProcesses
from megatron_grpo.engines.sglang.args import (
    check_folder_loaded,
    check_sglang_arguments,
    sglang_command,
    sglang_environment,
)
from megatron_grpo.engines.support import (
    check_cache,
    check_drafts,
    check_kernels,
    check_served,
    check_towers_served,
    num_gpus,
)
from megatron_grpo.engines.vllm.args import (
    NO_ADAPTERS,
    check_engine_arguments,
    vllm_command,
    vllm_environment,
)
from megatron_grpo.launch.network import GLOO_VARIABLE, choose_interface, in_url
from megatron_grpo.launch.placement import NODES_VARIABLE, check_engine_size, check_shared
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, check_token, new_token
from megatron_grpo.workers.proxies import direct
from parallel.words import counted

# A trainer rank's place in its distributed job; an engine that saw it would try to join.
RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_|TORCHELASTIC_|PET_|OMP_"
    # ... and settings for ranks alone. vLLM's all-reduce opens the memory of other workers by CUDA
    # IPC, which does not work with expandable segments.
    "|CUDA_DEVICE_MAX_CONNECTIONS$|TORCH_GLOO_LAZY_INIT$|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF$"
)


class EngineServers(ServerProcesses):
    """The engines of a run: `rollout.base_urls`, accessed with `token`, or else processes of this
    host with a fresh token.

    The processes get the GPUs after those of the host's `num_ranks` trainer ranks, or share the
    ranks' GPUs if too few are left.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        log_dir: Path,
        token: str | None,
        num_ranks: int = 0,
        lora: LoraConfig = NO_ADAPTERS,
        num_completions: int = 0,
    ) -> None:
        super().__init__(tuple(url.rstrip("/") for url in rollout.base_urls), log_dir)
        self.share_gpus = False
        """Whether engines started here share the GPUs of trainer ranks."""
        self.token = check_token(token) if rollout.base_urls else new_token()
        if rollout.base_urls:
            return
        check_arguments(rollout)
        num_devices = num_gpus()
        devices = engine_devices(rollout, num_devices, num_ranks, os.environ)
        self.share_gpus = share_gpus(rollout, num_devices, num_ranks)
        command = partial(
            engine_command,
            model,
            rollout,
            LOOPBACK,
            token=self.token,
            lora=lora,
            num_completions=num_completions,
        )
        commands = [partial(command, devices=gpus) for gpus in devices]
        self.start({f"engine_{number}": each for number, each in enumerate(commands)})


def check_arguments(rollout: RolloutConfig) -> None:
    """Raise ValueError if the engine is not installed, or lacks an argument of the config."""
    if rollout.engine == "vllm":
        check_engine_arguments(rollout.vllm, rollout.tool_call_parser)
    else:
        check_sglang_arguments(rollout)


def check_model_served(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if engines cannot split the model, or serve it as configured."""
    check_engine_dims(shape, engine_dims(cfg.rollout))
    check_served(cfg.rollout, shape)
    check_towers_served(cfg.model, cfg.rollout)
    check_cache(cfg.model, cfg.rollout)
    if cfg.rollout.engine == "sglang":
        check_folder_loaded(cfg.model, cfg.rollout)
    check_drafts(cfg, shape)


def share_gpus(rollout: RolloutConfig, num_devices: int, num_ranks: int) -> bool:
    """Whether `num_ranks` trainer ranks, one per GPU, leave too few GPUs for the engines."""
    wanted = rollout.num_engines * rollout.gpus_per_engine
    return 0 < num_devices < num_ranks + wanted


def engine_devices(
    rollout: RolloutConfig, num_devices: int, num_ranks: int, environ: Mapping[str, str]
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every engine: GPUs after those of `num_ranks` trainer ranks, or if
    these are too few, the ranks' GPUs from the first on; None without GPUs.

    ValueError if the host has too few GPUs, if engines may not share them (`check_shared`), or if
    an engine has no memory limit on a shared GPU.
    """
    size, num_engines = rollout.gpus_per_engine, rollout.num_engines
    if num_devices == 0:
        return [None] * num_engines
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    gpus = visible.split(",")[:num_devices]
    if not share_gpus(rollout, num_devices, num_ranks):
        gpus = gpus[num_ranks:]
    elif num_engines * size > num_devices:
        raise ValueError(
            f"rollout.num_engines {num_engines} of {rollout.engine_size_text} need "
            f"{num_engines * size} GPUs, but this host has {num_devices}: lower one of them, or "
            "use engines on other hosts with rollout.base_urls"
        )
    else:
        check_shared(rollout, num_ranks, num_devices)
        fraction = PLANNED[rollout.engine].memory_fraction
        if fraction not in engine_table(rollout):
            raise ValueError(
                f"trainer ranks take {num_ranks} of {counted(num_devices, 'GPU')}, and engines "
                f"need {num_engines * size}: they would share the ranks' GPUs. Set the fraction of "
                f"a GPU that an engine may use, such as rollout.{rollout.engine}.{fraction}=0.4"
            )
    return [",".join(gpus[i * size : (i + 1) * size]) for i in range(num_engines)]


def engine_environment(
    environ: Mapping[str, str], devices: str | None, host: str = LOOPBACK, num_threads: int = 1
) -> dict[str, str]:
    """`environ` without the variables of a trainer rank, with the engine's devices, or if it has
    none, the threads of each of its workers."""
    environment = {k: v for k, v in environ.items() if not RANK_VARIABLES.match(k)}
    # SGLang sends itself a request at `host` before it serves, which no proxy may take.
    environment |= direct(environ, host)
    if devices is not None:
        return environment | {"CUDA_VISIBLE_DEVICES": devices}
    # Engines and ranks share cores. By default OpenMP threads spin while they wait: two threads of
    # an engine are then thirty times slower than one on a busy machine.
    return environment | {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}


def engine_command(
    model: ModelConfig,
    rollout: RolloutConfig,
    host: str,
    port: int,
    devices: str | None,
    token: str,
    node: EngineNode = ONE_NODE,
    lora: LoraConfig = NO_ADAPTERS,
    num_completions: int = 0,
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one engine on `host`:`port`, or of one `node` of it."""
    num_threads = len(os.sched_getaffinity(0)) // (rollout.num_engines * rollout.gpus_per_engine)
    environment = engine_environment(os.environ, devices, host, max(1, num_threads))
    environment[TOKEN_VARIABLE] = token
    on_gpu = devices is not None
    if node.nnodes == 1:
        # Gloo has no authentication; by itself it listens at the address of the host's name.
        environment[GLOO_VARIABLE] = "lo"
    else:
        choose_interface(environment, node.master_addr)
    if rollout.engine == "sglang":
        environment |= sglang_environment(model, rollout, on_gpu)
        environment["SGLANG_HOST_IP"] = host  # as VLLM_HOST_IP below
        return sglang_command(model, rollout, host, port, on_gpu, node), environment
    environment |= vllm_environment(model, rollout, on_gpu)
    if lora.is_served:  # the route that gives the adapter its name
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    # The address for vLLM's processes on other nodes; vLLM would take any address of this host.
    environment["VLLM_HOST_IP"] = host
    command = vllm_command(model, rollout, host, port, on_gpu, node, lora, num_completions)
    return command, environment


def serve(
    cfg: Config,
    host: str,
    port: int,
    token: str,
    node: EngineNode,
    join: Callable[[], bool] | None = None,
) -> NoReturn:
    """Become an engine on `host`:`port`, or a further `node` of it, whose address is `host`.

    With `join`, the engine is a child process and joins the run of `cfg`; `join()` is True once the
    run is complete.
    """
    model, rollout = cfg.model, cfg.rollout
    if join and (reason := refusal(cfg)):
        raise ValueError(f"--join: {reason}")
    check_host(host, port if node.node_rank == 0 else 0)
    # Processes do not always notice the end of another node's, vLLM's never; their keeper does.
    keepers = (NODES_VARIABLE, "SLURM_STEP_NUM_NODES")
    if node.nnodes > 1 and str(node.nnodes) not in map(os.environ.get, keepers):
        raise ValueError(
            f"--nnodes {node.nnodes}: an engine spans nodes only where something ends it on all of "
            "them together: start it by `train --nnodes`, or by the job scripts in slurm/; else "
            "set rollout.tensor_parallel_size (times rollout.data_parallel_size) to the GPUs of "
            "one host at most"
        )
    if node.node_rank >= node.nnodes or rollout.gpus_per_engine % node.nnodes:
        raise ValueError(
            f"--node-rank {node.node_rank} of --nnodes {node.nnodes} for "
            f"{rollout.engine_size_text}: nodes are counted from 0, and each has an equal part of "
            "the engine"
        )
    check_engine_size(rollout, size := rollout.gpus_per_engine // node.nnodes)
    check_arguments(rollout)
    model.check_folder()
    check_model_served(cfg, shape := trained_shape(cfg))
    # It checks nothing for engines at addresses, but this host runs one.
    check_kernels(rollout.model_copy(update={"base_urls": ()}), shape, model.dtype)
    # Engines take the visible GPUs of a node for their workers there.
    sizes = {"num_engines": 1, "tensor_parallel_size": size, "data_parallel_size": 1}
    part = rollout.model_copy(update=sizes)
    [devices] = engine_devices(part, num_gpus(), 0, os.environ)
    command, environment = engine_command(
        model, rollout, host, port, devices, token, node, cfg.lora, cfg.completions_per_engine
    )
    if join and node.node_rank == 0:
        engine = JoinedEngine(
            f"http://{in_url(host)}:{port}", settings_of(model, rollout, cfg.lora)
        )
        serve_joined(command, environment, cfg.train.run_dir / FOLDER, engine, join)
    os.execve(command[0], command, environment)
