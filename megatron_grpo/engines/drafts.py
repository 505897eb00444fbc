"""Speculative decoding, `rollout.vllm.speculative_config`: its checks and its metrics."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping

import httpx

from checkpoint_convert import ModelShape
from checkpoint_convert.formats.hf_folder import mtp_tensors
from checkpoint_convert.hf_config import read_scheme
from megatron_grpo.config.config import Config
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineError
from megatron_grpo.workers.tasks import gather_all

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods to draft that have no weights."""

_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts_total(?:{.*})? (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d+)".*} (\S+)$',
    re.MULTILINE,
)


def check_drafts(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if engines would draft with weights that they do not have."""
    table = cfg.rollout.vllm.get("speculative_config") or {}
    if not isinstance(table, dict):
        raise ValueError(
            f"rollout.vllm.speculative_config is {table!r}: give a table, such as "
            "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 2}"
        )
    if not table:
        return
    if shape.indexer:
        raise ValueError(
            "rollout.vllm.speculative_config is not supported for a model with sparse attention: "
            "leave it out"
        )
    if table.get("method") is None:  # vLLM would find one by the model
        raise ValueError(
            f"rollout.vllm.speculative_config {table} has no method: give its method, such as mtp"
        )
    method, model = str(table["method"]), table.get("model")
    are_there = method in WITHOUT_WEIGHTS or (method.endswith("mtp") and shape.trains_mtp)
    if not are_there and cfg.rollout.vllm.get("load_format") == "dummy":
        raise ValueError(
            "rollout.vllm.load_format dummy: the weights that engines draft with are not pushed; "
            "leave out speculative_config, or load_format"
        )
    if not method.endswith("mtp"):
        return
    if read_scheme(cfg.model.path) is not None:
        raise ValueError(
            f"rollout.vllm.speculative_config drafts with {method}, and model.path has quantised "
            "weights, which vLLM dequantises without the layer for it: leave it out, or train from "
            "a copy that is not quantised"
        )
    is_own = model in (None, str(cfg.model.path))
    if shape.trains_mtp:
        others = {
            f"rollout.vllm.speculative_config of the model {model}": not is_own,
            "rollout.weight_transport disk": cfg.rollout.weight_transport == "disk",
            **{
                f"rollout.vllm.speculative_config.{name}": name in table
                for name in ("quantization", "draft_tensor_parallel_size")
            },
        }
        if told := [key for key, is_on in others.items() if is_on]:
            raise ValueError(
                f"{told[0]} does not go with model.mtp_num_layers 1, which pushes the layer that "
                "engines draft with: leave out one of the two"
            )
    elif is_own and not mtp_tensors(cfg.model.path, shape):
        raise ValueError(
            f"rollout.vllm.speculative_config drafts with {method}, and model.path has no layer "
            "for multi-token prediction: give as its `model` a folder that has it, or leave it out"
        )


def draft_counts(page: str) -> Counter[int]:
    """Counts since an engine's start, from its metrics page: of drafts at key 0, and at key n of
    those whose n-th token was accepted."""
    counts = Counter({0: sum(int(float(count)) for count in _DRAFTS.findall(page))})
    for position, count in _ACCEPTED.findall(page):
        counts[int(position) + 1] += int(float(count))
    return counts


class DraftMeter:
    """Measures drafts between two calls, as engines count them since their start."""

    def __init__(self, client: RolloutClient, *, are_new: bool) -> None:
        """`are_new`: the engines were started for this run, and have counted nothing else."""
        self._client, self._are_new = client, are_new
        self._before: dict[str, Counter[int]] = {}

    def metrics(self) -> dict[str, float]:
        """By vLLM's names, of the drafts since the last call: the mean acceptance length (accepted
        tokens of a draft, plus the one that the model adds), and the acceptance rate at each
        position.

        Empty without drafts. Engines that do not answer, or that have joined since, are left out.
        """
        urls = [url for url, _ in self._client.pool.up]
        pages = asyncio.run(gather_all(map(self._page, urls)))
        metrics = self.compare(dict(zip(urls, pages, strict=True)))
        self._are_new = False
        return metrics

    def compare(self, pages: Mapping[str, str]) -> dict[str, float]:
        """`metrics` from the metrics pages of engines, by address; "" if one did not answer."""
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
            async with self._client.connect(url) as engine:
                return await engine.metrics(httpx.Timeout(engine.health_timeout))
        except (EngineError, TimeoutError):
            return ""
