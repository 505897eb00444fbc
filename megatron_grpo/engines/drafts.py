"""How many draft tokens engines take, with `rollout.vllm.speculative_config`."""

import asyncio
import re
from collections import Counter

import httpx

from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineError
from megatron_grpo.workers.tasks import gather_all

_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d+)".*} (\S+)$',
    re.MULTILINE,
)


def draft_counts(page: str) -> Counter[int]:
    """From an engine's metrics: the drafts since its start, at 0, and how many of them had their
    n-th token accepted, at n."""
    counts = Counter({0: sum(int(float(count)) for count in _DRAFTS.findall(page))})
    for position, count in _ACCEPTED.findall(page):
        counts[int(position) + 1] += int(float(count))
    return counts


class DraftMeter:
    """Compares what engines have counted with what they had when they were asked before."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._before: dict[tuple[str, int], Counter[int]] = {}

    def metrics(self) -> dict[str, float]:
        """By vLLM's names, of the drafts since the last call: the mean acceptance length, in tokens
        of a draft with the one that the model adds, and the acceptance rate at each position.

        None without drafts. Engines that do not answer are left out.
        """
        lives = self._client.pool.up
        pages = asyncio.run(gather_all(self._page(url) for url, _ in lives))
        now = {life: draft_counts(page) for life, page in zip(lives, pages, strict=True) if page}
        new: Counter[int] = Counter()
        for life, counts in now.items():
            before = self._before.get(life, Counter[int]())
            new.update({n: count - before[n] for n, count in counts.items()})
        self._before |= now
        if not (num_drafts := new.pop(0, 0)):
            return {}
        rates = {f"rollout/acceptance_rate/{n}": new[n] / num_drafts for n in sorted(new)}
        return {"rollout/acceptance_length": 1 + new.total() / num_drafts, **rates}

    async def _page(self, url: str) -> str:
        try:
            async with self._client.connect(url) as engine:
                return await engine.metrics(httpx.Timeout(engine.patience.health))
        except (EngineError, TimeoutError):
            return ""
