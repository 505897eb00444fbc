"""Our code inside the process of an SGLang worker, which SGLang calls a scheduler.

Its route /weights_checker passes a request on to all workers and takes an answer of each: the one
way into them that brings data back. So the client's calls travel as actions of that route.
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
"""The key of an answer that is an error."""
CALL = "megatron_grpo "
"""Prefix of the action of a request that is a call of ours; its arguments follow."""
OF_CACHE = (".k_scale", ".v_scale")
"""Endings of the names of scales for keys and values."""


def call_of(arguments: Json) -> str:
    """The action that has the `PushWorker` of every worker answer a call."""
    return CALL + json.dumps(arguments)


class SchedulerWorker(PushWorker):
    """The weights of a worker of SGLang; ValueError if it keeps values made of them at its start
    that updates do not reach."""

    def __init__(self, manager: SchedulerWeightUpdaterManager) -> None:
        self.runner = manager.tp_worker.model_runner
        if error := _unsupported_derived_weight_cache_error(self.runner.model):
            raise ValueError(error)
        group = manager.tp_cpu_group
        super().__init__(dist.get_rank(group), next(self.runner.model.parameters()).device)
        unlink_queues()

    def tensors(self) -> dict[str, Tensor]:
        """The parameters of its part of the model, without scales for keys and values, which are
        ones: these are cached as they are."""
        held = pushable_parameters(self.runner.model, VISION_VARIABLE in os.environ)
        return {name: each for name, each in held.items() if not name.endswith(OF_CACHE)}

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive between what SGLang does before and after weights change. Sums of 8-bit weights
        are taken after it: it must leave these as they came."""
        self.runner.weight_updater.begin_weight_update()
        sums = super().receive(receiver, received)
        self.runner.weight_updater.end_weight_update(run_post_load=True)
        refresh_norms(self.runner.model)
        if VISION_VARIABLE in os.environ:
            forget_features()
        held = self.tensors()
        return checksums(held) if any(each.itemsize == 1 for each in held.values()) else sums

    def can_sleep(self) -> bool:
        """Whether SGLang's memory saver is on; a CPU has no memory to give away."""
        return is_cpu() or bool(get_exec().features.enable_memory_saver)


def refresh_norms(model: Module) -> None:
    """Let norms that multiply by 1 + their weights keep the new sums, which some kernels read:
    SGLang does so only where it loads weights itself."""
    for module in model.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()


def unlink_queues() -> None:
    """Unlink the shared memory by which this process sends to other workers, which SGLang leaves
    behind: all have mapped it, and it is freed with its last process."""
    for file in Path("/dev/shm").glob(f"sgl_shm_mq_{os.getpid()}_*"):
        file.unlink(missing_ok=True)
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
    except Exception as error:  # the others wait for this worker's answer
        traceback.print_exc()
        own = {FAILED: repr(error)}
    answers: list[Any] = [None] * dist.get_world_size(manager.tp_cpu_group)
    dist.all_gather_object(answers, own, group=manager.tp_cpu_group)
    succeeded = not any(FAILED in each for each in answers)
    # SGLang joins what the first worker of each group says.
    message = json.dumps(answers) if dist.get_rank(manager.tp_cpu_group) == 0 else ""
    return CheckWeightsReqOutput(success=succeeded, message=message)
