"""Attributes of vLLM that our code in its processes replaces: `PATCHES`."""

import sys
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from fastapi.responses import JSONResponse
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import RequestState

from megatron_grpo.engines.patches import Patch
from megatron_grpo.unicode import as_unicode


async def answer_for_all_groups(
    _: Callable[..., Any],
    client: AsyncMPClient,
    method: str,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the answers of the workers of all data-parallel groups."""
    call = "collective_rpc", method, timeout, args, kwargs
    return list(chain.from_iterable(await client.call_utility_all_async(*call)))


def keep_running_requests(
    reset: Callable[..., bool],
    scheduler: Scheduler,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    """Empty the prefix cache beside requests that run; these keep their blocks."""
    if reset_running_requests:
        return reset(scheduler, reset_running_requests, reset_connector)
    # A prompt of which old weights have computed a part only is computed anew: nothing tells which
    # of its keys are whose. So is a completion that was preempted, and is computed again.
    for request in [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens - 1]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # Else the worker would take it for one whose blocks it has since the last step.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    kept = [request.request_id for request in scheduler.running]
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # All blocks lose their hash, in use or not; blocks in use stay allocated. Managers of one model
    # may share a pool.
    for pool in dict.fromkeys(manager.block_pool for manager in managers):
        pool.evict_blocks({*range(len(pool.blocks))})
    # What kept requests compute from now on follows keys of older weights, and must not be found by
    # a prompt that begins with their tokens, such as the next turn's. vLLM caches full blocks from
    # the count of cached ones on: beyond the largest count there is none.
    for manager in managers:
        manager.num_cached_block.update(dict.fromkeys(kept, sys.maxsize))
    return True


def send_versions_of_chunks(
    new_output: Callable[..., CompletionOutput], state: RequestState, *args: Any
) -> CompletionOutput:
    """Send with each chunk of a stream which weights have sampled the tokens so far."""
    output = new_output(state, *args)
    output.weight_versions = state._weight_version_spans()
    return output


def send_only_unicode(render: Callable[..., bytes], response: JSONResponse, content: Any) -> bytes:
    """Send `?` for each half of a surrogate pair."""
    try:
        return render(response, content)
    except UnicodeEncodeError:
        return render(response, as_unicode(content))


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
)
