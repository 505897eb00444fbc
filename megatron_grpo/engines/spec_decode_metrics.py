"""Accepted drafts of speculative decoding (`rollout.vllm.speculative_config`) in the engines."""

import re
from collections import Counter
from collections.abc import Mapping

from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineError
from megatron_grpo.workers.tasks import gather_all

_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts_total(?:{.*})? (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d+)".*} (\S+)$',
    re.MULTILINE,
)


def draft_counts(page: str) -> Counter[int]:
    """Counts on a metrics page: all drafts at key 0, drafts with their n-th token accepted at n."""
    counts = Counter({0: sum(int(float(count)) for count in _DRAFTS.findall(page))})
    for position, count in _ACCEPTED.findall(page):
        counts[int(position) + 1] += int(float(count))
    return counts


class SpecDecodeMetrics:
    """Drafts between two calls: differences of the engines' counters."""

    def __init__(self, client: RolloutClient, *, are_new: bool) -> None:
        """`are_new`: the engines were started for this run, with counters at 0."""
        self._client, self._are_new = client, are_new
        self._before: dict[str, Counter[int]] = {}

    def metrics(self) -> dict[str, float]:
        """Mean acceptance length (with the token that the model adds) and acceptance rate by
        position, since the last call, by vLLM's names. Empty without drafts; engines without an
        answer, or without an earlier count, are left out."""
        urls = [*self._client.pool.up]
        pages = self._client.loop.call(gather_all(map(self._page, urls)))
        metrics = self.compare(dict(zip(urls, pages, strict=True)))
        self._are_new = False
        return metrics

    def compare(self, pages: Mapping[str, str]) -> dict[str, float]:
        """`metrics` from pages by address; "" of an engine without an answer."""
        new: Counter[int] = Counter()
        for url, page in pages.items():
            if not page:
                continue
            counts = draft_counts(page)
            before = self._before.get(url, Counter() if self._are_new else counts)
            if counts[0] < before[0]:  # the engine was restarted
                before = Counter()
            new.update({n: count - before[n] for n, count in counts.items()})
            self._before[url] = counts
        if not (num_drafts := new.pop(0, 0)):
            return {}
        rates = {f"rollout/acceptance_rate/{n}": new[n] / num_drafts for n in sorted(new)}
        return {"rollout/acceptance_length": 1 + new.total() / num_drafts, **rates}

    async def _page(self, url: str) -> str:
        try:
            engine = self._client.engine(url)
            return await engine.metrics(engine.health_timeout)
        except (EngineError, TimeoutError):
            return ""
