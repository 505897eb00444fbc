"""Workers of vLLM without an engine around them: the parameters that each holds of a model.

A worker is the class that an engine would start, in a rank of ours; it sets up vLLM's groups and
loads the model by vLLM's own loader. No cache, no scheduler, no server: a second per model.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from checkpoint_convert.vllm import EngineDims
from distributed import run_ranks
from megatron_grpo.rollout.vllm_command import vllm_environment

Parameters = dict[str, Tensor]
Read = Callable[[Module, Path, EngineDims], Any]
"""Called in a worker with the model that it has loaded, the model's folder and the dims."""


def loaded_parameters(
    models: Sequence[tuple[Path, EngineDims]], dtype: str = "float32"
) -> list[list[Parameters]]:
    """Of each model: what each worker holds after loading. All of one tensor parallel size."""
    return read_in_workers(models, _parameters, dtype)


def _parameters(model: Module, folder: Path, dims: EngineDims) -> Parameters:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def read_in_workers(
    models: Sequence[tuple[Path, EngineDims]], read: Read, dtype: str = "float32"
) -> list[list[Any]]:
    """Of each model: what `read` returns in each worker. All of one tensor parallel size."""
    (size,) = {dims.tensor for _, dims in models}
    by_rank = run_ranks(size, _load, models, read, dtype)
    return [list(workers) for workers in zip(*by_rank, strict=True)]


def _load(
    rank: int, models: Sequence[tuple[Path, EngineDims]], read: Read, dtype: str
) -> list[Any]:
    os.environ.update(vllm_environment(models[0][1].tensor, on_gpu=False))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    # Here because vLLM reads its environment when it is imported. Making a config calls our plugin.
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.cpu_worker import CPUWorker

    loaded = []
    for folder, dims in models:
        config = EngineArgs(
            model=str(folder),
            dtype=dtype,
            tensor_parallel_size=dims.tensor,
            enable_expert_parallel=dims.expert_parallel,
            enforce_eager=True,
            block_size=32,
            kv_cache_memory_bytes=2**20,
            distributed_executor_backend="mp",
        ).create_engine_config()
        with set_current_vllm_config(config):
            # Workers that are told different names reduce over gloo and not over shared memory,
            # which a killed rank would leave behind.
            worker = CPUWorker(config, rank, rank, f"file:///rank{rank}", is_driver_worker=True)
            worker.init_device()
            worker.load_model()
            loaded.append(read(worker.get_model(), folder, dims))
        destroy_model_parallel()
    return loaded
