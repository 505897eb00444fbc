"""The reward pools of a process, one for each way of scoring."""

from megatron_grpo.config.reward_config import RewardConfig
from megatron_grpo.rewards.pool import RewardPool


class RewardPools:
    """Reward pools by config: whatever is scored alike shares one."""

    def __init__(self) -> None:
        self._pools: list[RewardPool] = []

    def of(self, cfg: RewardConfig) -> RewardPool:
        """The pool of `cfg`, which starts at the first call."""
        for pool in self._pools:
            if pool.cfg == cfg:
                return pool
        self._pools.append(RewardPool(cfg))
        return self._pools[-1]

    def cancel(self) -> None:
        """Soon end a running `score` of any pool; safe from any thread."""
        for pool in self._pools:
            pool.cancel()

    def close(self) -> None:
        """Kill the workers of all pools."""
        for pool in self._pools:
            pool.close()
