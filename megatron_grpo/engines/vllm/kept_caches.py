"""Keys and values that requests keep through a push of weights (`rollout.recompute_kv_cache`
false): theirs alone, which no other request may find in the prefix cache."""

import sys
import time

from vllm.v1.core.sched.scheduler import Scheduler

_reset_prefix_cache = Scheduler.reset_prefix_cache


def keep_caches() -> None:
    """Let a reset of the prefix cache succeed beside requests that run, and leave them theirs.

    vLLM's own does nothing then: prompts that come later would be served what old weights have
    computed.
    """
    Scheduler.reset_prefix_cache = reset_prefix_cache


def reset_prefix_cache(
    self: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False
) -> bool:
    """Empty the prefix cache; requests that have begun to sample keep their blocks.

    What these compute from now on follows keys of older weights, so it is not cached either: a
    prompt that begins like a completion in progress, such as the next turn's, would find it. A
    request of which only a part of the prompt is computed begins anew.
    """
    if reset_running_requests:
        return _reset_prefix_cache(self, reset_running_requests, reset_connector)
    for request in [each for each in self.running if not each.num_output_tokens]:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
    kept = [request.request_id for request in self.running]
    for manager in self.kv_cache_manager.coordinator.single_type_managers:
        pool = manager.block_pool
        pool.evict_blocks({*range(len(pool.blocks))})
        manager.num_cached_block.update(dict.fromkeys(kept, sys.maxsize))
    return True
