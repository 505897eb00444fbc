"""An SGLang engine for CPUs that loses what is in its memory while it sleeps, as those on GPUs do.

Those have SGLang's memory saver, which gives back what was allocated while the model was loaded and
while the cache was made. All of its processes import this file, as it is their main module.
"""

from itertools import chain
from typing import Any

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from torch import Tensor

from megatron_grpo.engines.sglang.server import main

release = SchedulerWeightUpdaterManager.release_memory_occupation


def lose(part: str, runner: Any) -> None:
    modules = list(runner.model.modules())
    held = [each for module in modules for each in chain(vars(module).values(), module.buffers())]
    pool = runner.token_to_kv_pool
    contents = {
        "weights": [*held, *runner.model.parameters()],
        "kv_cache": [*pool.k_buffer, *pool.v_buffer],
    }
    for tensor in contents[part]:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.data.fill_(torch.nan)


def released(self: SchedulerWeightUpdaterManager, request: Any) -> Any:
    answer = release(self, request)
    for part in request.tags:
        lose(part, self.tp_worker.model_runner)
    return answer


SchedulerWeightUpdaterManager.release_memory_occupation = released

if __name__ == "__main__":
    main()
