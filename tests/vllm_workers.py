"""Workers of vLLM without an engine around them: the parameters that each holds of a model.

A worker is the class that an engine would start, in a rank of ours; it sets up vLLM's groups and
loads the model by vLLM's own loader. No cache, no scheduler, no server: a second per model.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from checkpoint_convert.vllm import EngineDims
from distributed import run_ranks
from megatron_grpo.rollout.vllm_command import vllm_environment

Parameters = dict[str, Tensor]


def loaded_parameters(
    models: Sequence[tuple[Path, EngineDims]], dtype: str = "float32"
) -> list[list[Parameters]]:
    """Of each model: what each worker holds after loading. All of one tensor parallel size."""
    (size,) = {dims.tensor for _, dims in models}
    by_rank = run_ranks(size, _load, models, dtype)
    return [list(workers) for workers in zip(*by_rank, strict=True)]


def _load(rank: int, models: Sequence[tuple[Path, EngineDims]], dtype: str) -> list[Parameters]:
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
            parameters = worker.get_model().named_parameters()
            loaded.append({name: value.detach().clone() for name, value in parameters})
        destroy_model_parallel()
    return loaded
