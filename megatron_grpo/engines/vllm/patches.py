"""Attributes of vLLM that our code in its processes replaces: `PATCHES`; without a GPU also
`CPU_PATCHES`."""

import glob
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops
from fastapi.responses import JSONResponse
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import RequestState

from megatron_grpo.engines.patches import Patch
from megatron_grpo.launch.parent_death import die_with_parent
from megatron_grpo.unicode import as_unicode


async def answer_for_all_groups(
    _: Callable[..., Any],
    client: AsyncMPClient,
    method: str,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    call = "collective_rpc", method, timeout, args, kwargs
    return list(chain.from_iterable(await client.call_utility_all_async(*call)))


def keep_running_requests(
    reset: Callable[..., bool],
    scheduler: Scheduler,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    """Empty the prefix cache; running requests keep their blocks."""
    if reset_running_requests:
        return reset(scheduler, reset_running_requests, reset_connector)
    # Prompts that old weights have computed in part start anew: their keys would be of two
    # versions, and no record says where one ends. So do preempted completions while they are
    # recomputed.
    for request in [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens - 1]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # Else the worker would reuse the request's blocks of the last step.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    kept = [request.request_id for request in scheduler.running]
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # All blocks lose their hash; blocks in use stay allocated. Managers of a model may share a
    # pool, which is emptied once.
    for pool in dict.fromkeys(manager.block_pool for manager in managers):
        pool.evict_blocks({*range(len(pool.blocks))})
    # Later blocks of kept requests follow keys of old weights: no prompt that begins with their
    # tokens, such as the next turn's, may find them. vLLM caches full blocks from the number of
    # cached ones on, and never reaches `sys.maxsize`.
    for manager in managers:
        manager.num_cached_block.update(dict.fromkeys(kept, sys.maxsize))
    return True


def send_versions_of_chunks(
    new_output: Callable[..., CompletionOutput], state: RequestState, *args: Any
) -> CompletionOutput:
    output = new_output(state, *args)
    output.weight_versions = state._weight_version_spans()
    return output


def send_only_unicode(render: Callable[..., bytes], response: JSONResponse, content: Any) -> bytes:
    try:
        return render(response, content)
    except UnicodeEncodeError:
        return render(response, as_unicode(content))


def take_triton(_: Callable[..., bool], experts: Any) -> bool:
    return False


def keep_unpacked(_: Callable[..., bool], *sizes: Any) -> bool:
    return False


def judge_drafts_at_temperatures(
    _: Callable[..., None],
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replaced: int,
    replacement: int,
    max_tokens: int,
) -> None:
    """Expand a value per request, such as the temperature, to one per draft token.

    `ends` [requests] are the ends of the requests' draft tokens: values [a, b] with ends [2, 3]
    give [a, a, b].
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = torch.where(values == replaced, replacement, values)
    output.copy_(values.repeat_interleave(counts))


def examine_here(_: Callable[..., Any], examine: Callable[[], Any]) -> Any:
    return examine()


def unlink_group_memory(join: Callable[..., int], group: _CPUSHMDistributed) -> int:
    handle = join(group)  # returns when all workers of the group have mapped it
    for file in Path("/dev/shm").glob(f"{glob.escape(group.group_name)}*"):
        file.unlink(missing_ok=True)
    return handle


class _ForkedCore(ForkProcess):
    """An engine core that dies with its API server; as a fork it has our plugin already."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        die_with_parent()
        # `is_alive()` reads a pipe, which cores that are forked later hold open.
        if parent is None or os.getppid() != parent.pid:
            sys.exit("the process that started this one has ended")
        signal.set_wakeup_fd(-1)  # inherited: this core's signals would wake the API server's loop
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class _ForkingContext(ForkContext):
    Process = _ForkedCore


def set_up_cpu() -> None:
    """Set attributes that are no functions: weights stay unpacked (see `CPU_PATCHES`), and engine
    cores are forked; workers are started as by default."""
    vllm._custom_ops._supports_onednn = False
    # A spawned core imports all of vLLM once more. A fork hangs if the API server has computed with
    # several OpenMP threads before.
    if multiprocessing.parent_process() is None:
        torch.set_num_threads(1)
    engine_utils.get_mp_context = _ForkingContext


PATCHES = (
    Patch(
        target="vllm.v1.engine.core_client:AsyncMPClient.collective_rpc_async",
        replacement=answer_for_all_groups,
        because_of="return await self.call_utility_async(",
        why="workers of all groups are called, and those of the first are heard: the sums that "
        "others have received would not be compared with what was pushed",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
        replacement=keep_running_requests,
        because_of="reset_successful = self.kv_cache_manager.reset_prefix_cache()",
        why="rollout.recompute_kv_cache false: while requests run it does nothing, so that later "
        "prompts would be served keys and values of old weights",
        upstream="https://github.com/vllm-project/vllm/issues/32103",
    ),
    Patch(
        target="vllm.v1.engine.output_processor:RequestState._new_completion_output",
        replacement=send_versions_of_chunks,
        because_of="self._weight_version_spans() if finished else None",
        why="the last chunk of a stream has them alone, and an engine that dies does not send it",
        upstream="https://github.com/vllm-project/vllm/issues/54443",
    ),
    Patch(
        target="starlette.responses:JSONResponse.render",
        replacement=send_only_unicode,
        because_of="ensure_ascii=False",
        why="a model may write half of a surrogate pair in the arguments of a call, and its answer "
        "would be an error 500",
    ),
    Patch(
        target="vllm.model_executor.layers.fused_moe.oracle.unquantized:"
        "_trtllm_bf16_lora_supported",
        replacement=take_triton,
        because_of="supported, _ = TrtLlmBf16LoRAExperts.is_supported_config(",
        why="with adapters it ignores `moe_backend`, and on Blackwell takes kernels that reorder "
        "experts' weights: their sums would differ from the ranks'",
    ),
)

CPU_PATCHES = (
    Patch(
        target="vllm.model_executor.layers.utils:check_cpu_sgl_kernel",
        replacement=keep_unpacked,
        because_of="if not torch.cpu._is_amx_tile_supported() or dtype not in (",
        why="linear weights would be packed after loading, and an empty parameter left behind: "
        "pushed ones would not reach the packed copies, nor that of a tied lm_head",
    ),
    Patch(
        target="vllm.utils.cpu_triton_utils:_expand_kernel_impl",
        replacement=judge_drafts_at_temperatures,
        because_of="_ensure_int64(output),",
        why="values go into a copy of `output` in integers, which is dropped: drafts would be "
        "judged by whatever is in memory",
    ),
    Patch(
        target="vllm.model_executor.models.registry:_run_in_subprocess",
        replacement=examine_here,
        because_of="_SUBPROCESS_COMMAND, input=input_bytes",
        why="to look at a model's class, another process would import all of vLLM, lest CUDA be "
        "initialized",
    ),
    Patch(
        target="vllm.distributed.device_communicators.cpu_communicator:"
        "_CPUSHMDistributed._init_cpu_shm",
        replacement=unlink_group_memory,
        because_of="handle = torch.ops._C.init_shm_manager(",
        why="memory in which workers reduce tensors would stay if they are killed; unlinked, it is "
        "freed with its last process",
    ),
)
