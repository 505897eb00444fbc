"""Our code inside the process of an SGLang worker, which SGLang calls a scheduler.

SGLang's route /weights_checker is the only one that passes a request to all workers and returns
their answers. So the client's calls travel as actions of that route.
"""

import json
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.managers.io_struct import CheckWeightsReqInput, CheckWeightsReqOutput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_cpu
from torch import Tensor
from torch.nn import Module

from megatron_grpo.engine_weights.protocol import VISION_VARIABLE, Json, pushable_parameters
from megatron_grpo.engine_weights.worker import PushWorker, Receiver
from megatron_grpo.engines.sglang.images import forget_features
from parallel.checksum import checksums

FAILED = "failed"
"""Key of an error among answers."""
CALL = "megatron_grpo "
"""Prefix of actions that are our calls; the arguments follow as JSON."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Endings of the names of scales for keys and values."""


def call_of(arguments: Json) -> str:
    """Encode a call of every `PushWorker` as an action."""
    return CALL + json.dumps(arguments)


class SchedulerWorker(PushWorker):
    """The weights of a worker of SGLang; ValueError if its model caches derived values, which
    updates do not reach."""

    def __init__(self, manager: SchedulerWeightUpdaterManager) -> None:
        self.runner = manager.tp_worker.model_runner
        if error := _unsupported_derived_weight_cache_error(self.runner.model):
            raise ValueError(error)
        group = manager.tp_cpu_group
        super().__init__(dist.get_rank(group), next(self.runner.model.parameters()).device)
        unlink_queues()

    def tensors(self) -> dict[str, Tensor]:
        """Parameters of this worker, without the scales of keys and values: caches are unscaled,
        and these scales are ones."""
        held = pushable_parameters(self.runner.model, VISION_VARIABLE in os.environ)
        return {name: each for name, each in held.items() if not name.endswith(CACHE_SCALES)}

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive between SGLang's own steps before and after an update of weights."""
        self.runner.weight_updater.begin_weight_update()
        sums = super().receive(receiver, received)
        self.runner.weight_updater.end_weight_update(run_post_load=True)
        refresh_norms(self.runner.model)
        if VISION_VARIABLE in os.environ:
            forget_features()
        held = self.tensors()
        # Sums of 8-bit weights are taken here: SGLang's last step must not have changed them.
        return checksums(held) if any(each.itemsize == 1 for each in held.values()) else sums

    def can_sleep(self) -> bool:
        """Whether SGLang's memory saver is on; a CPU has no memory to give away."""
        return is_cpu() or bool(get_exec().features.enable_memory_saver)


def refresh_norms(model: Module) -> None:
    """Recompute the 1 + weight of Gemma's norms, which some kernels read: SGLang does so only when
    it loads weights itself."""
    for module in model.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()


def unlink_queues() -> None:
    """Unlink this process's queues in shared memory, which SGLang leaves behind: all workers have
    mapped them, so that the kernel frees them with the last process."""
    for file in Path("/dev/shm").glob(f"sgl_shm_mq_{os.getpid()}_*"):
        file.unlink(missing_ok=True)
        # Else Python's tracker would unlink it again at the end, and warn.
        resource_tracker.unregister(f"/{file.name}", "shared_memory")


_workers: list[SchedulerWorker] = []
"""The worker of this process, from the first call on."""


def answer_calls(
    check_weights: Callable[..., CheckWeightsReqOutput],
    manager: SchedulerWeightUpdaterManager,
    request: CheckWeightsReqInput,
) -> CheckWeightsReqOutput:
    """Answer calls of the trainer, which come as actions of this request."""
    if not request.action.startswith(CALL):
        return check_weights(manager, request)
    call = json.loads(request.action.removeprefix(CALL))
    try:
        if not _workers:
            _workers.append(SchedulerWorker(manager))
        own = _workers[0].answer(**call)
    except Exception as error:  # the other workers wait for this answer in the all-gather
        traceback.print_exc()
        own = {FAILED: repr(error)}
    answers: list[Any] = [None] * dist.get_world_size(manager.tp_cpu_group)
    dist.all_gather_object(answers, own, group=manager.tp_cpu_group)
    succeeded = not any(FAILED in each for each in answers)
    # SGLang joins the messages of each group's first worker.
    message = json.dumps(answers) if dist.get_rank(manager.tp_cpu_group) == 0 else ""
    return CheckWeightsReqOutput(success=succeeded, message=message)
