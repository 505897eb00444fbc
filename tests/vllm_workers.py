"""vLLM workers without an engine, for tests of the parameters that each worker holds.

A worker is the one an engine would start, but runs in one of our ranks: vLLM's own wrapper creates
it with our weight transfer and worker extension, and it sets up vLLM's groups and loads the model
with vLLM's own loader. Without cache, scheduler and server this takes a second per model.
"""

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from checkpoint_convert.vllm import EngineDims
from distributed import run_ranks
from megatron_grpo.engines.push_protocol import own_parameters
from megatron_grpo.engines.vllm_args import BACKEND, WORKER_EXTENSION, vllm_environment

Parameters = dict[str, Tensor]
Read = Callable[[Module, Path, EngineDims], Any]
"""Called in a worker with its loaded model, the model's folder and the engine's dims."""


def loaded_parameters(
    models: Sequence[tuple[Path, EngineDims]], dtype: str = "float32"
) -> list[list[Parameters]]:
    """Each worker's parameters of each model, as loaded. All dims share a tensor-parallel size."""
    return read_in_workers(models, _parameters, dtype)


def _parameters(model: Module, folder: Path, dims: EngineDims) -> Parameters:
    return {name: value.detach().clone() for name, value in own_parameters(model).items()}


def read_in_workers(
    models: Sequence[tuple[Path, EngineDims]], read: Read, dtype: str = "float32"
) -> list[list[Any]]:
    """Results of `read` for each model in each worker. All dims share a tensor-parallel size."""
    (size,) = {dims.tensor for _, dims in models}
    by_rank = run_ranks(size, _load, models, read, dtype)
    return [list(workers) for workers in zip(*by_rank, strict=True)]


def _load(
    rank: int, models: Sequence[tuple[Path, EngineDims]], read: Read, dtype: str
) -> list[Any]:
    become_worker(models[0][1].tensor)
    loaded = []
    for folder, dims in models:
        worker = start_worker(rank, folder, dims, dtype)
        loaded.append(read(worker.get_model(), folder, dims))
    return loaded


def become_worker(tensor_parallel_size: int) -> None:
    """Set the environment variables of a worker, which vLLM reads when it is imported."""
    os.environ.update(vllm_environment(tensor_parallel_size, on_gpu=False))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


def start_worker(rank: int, folder: Path, dims: EngineDims, dtype: str) -> Any:
    """Worker `rank` of a vLLM engine, with the model in `folder` loaded.

    Collective over the default group. An earlier worker of this process loses its groups but keeps
    its parameters. All workers must have the same tensor-parallel size.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    config = EngineArgs(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=dims.tensor,
        enable_expert_parallel=dims.expert_parallel,
        enforce_eager=True,
        block_size=32,
        attention_backend="CPU_MLA",
        kv_cache_memory_bytes=2**20,
        distributed_executor_backend="mp",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER_EXTENSION,
    ).create_engine_config()
    worker = WorkerWrapperBase(rank)
    arguments = {
        "vllm_config": config,
        "local_rank": rank,
        "rank": rank,
        # With different names, workers reduce over gloo and not over shared memory, which a killed
        # rank would leave behind.
        "distributed_init_method": f"file:///weights-{os.getpid()}",
        "is_driver_worker": True,
    }
    destroy_model_parallel()  # an MoE model requires a group that a dense model lacks
    worker.init_worker([arguments] * dims.tensor)
    worker.init_device()
    if not gc.get_freeze_count():
        gc.freeze()  # loading runs the GC twice, each a third of a second over all of vLLM
    worker.load_model()
    return worker
