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
    """Empty the prefix cache; requests keep their blocks.

    What these compute from now on follows keys of older weights, so it is not cached either: a
    prompt that begins like a completion in progress, such as the next turn's, would find it. A
    request of which only a part is computed begins anew: of its prompt, or of all that it has, if
    it was preempted before.
    """
    if reset_running_requests:
        return _reset_prefix_cache(self, reset_running_requests, reset_connector)
    for request in [r for r in self.running if r.num_computed_tokens < r.num_tokens - 1]:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
    kept = [request.request_id for request in self.running]
    managers = self.kv_cache_manager.coordinator.single_type_managers
    for pool in dict.fromkeys(manager.block_pool for manager in managers):
        pool.evict_blocks({*range(len(pool.blocks))})
    for manager in managers:
        manager.num_cached_block.update(dict.fromkeys(kept, sys.maxsize))
    return True
