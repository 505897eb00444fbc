"""The trainer's side of the rollout engines: prompts out and samples back, new weights out."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain, pairwise
from typing import Any, TypeVar

import httpx

from checkpoint_convert.vllm import EngineReport
from megatron_grpo.job_token import bearer
from megatron_grpo.prompts import Prompt
from megatron_grpo.rollout.engine import Engine, Json
from megatron_grpo.rollout.push_check import WorkerSums, check_reports
from megatron_grpo.rollout.samples import Sample, first_seed

CONNECT_TIMEOUT = 5.0

T = TypeVar("T")


class RolloutClient:
    """Speaks vLLM's HTTP routes with all engines at once.

    Any failure raises and names the engine: ConnectionError when it cannot be reached, TimeoutError
    when it has not answered within `request_timeout` seconds, EngineError when its answer is an
    error or not what was asked for.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        token: str,
        request_timeout: float,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.base_urls = tuple(base_urls)
        self.token = token
        self.request_timeout = request_timeout
        self.eos_token_ids = tuple(eos_token_ids)
        self._links = ""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int,
        temperature: float,
        max_completion_length: int,
        seed: int,
        step: int,
        policy_version: int,
    ) -> list[Sample]:
        """`num_generations` samples of each prompt, in the order of the prompts.

        One request asks for all samples of a prompt, which then share its prefix; each sample has a
        seed of its own (`first_seed`). Prompts are dealt to the engines in contiguous equal shares.
        Raises EngineError when an engine serves other weights than `policy_version`.
        """
        sampling: Json = {
            "n": num_generations,
            "temperature": temperature,
            "max_tokens": max_completion_length,
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": self.eos_token_ids,
            "ignore_eos": True,  # the tokenizer's one end token; those of the model are above
        }
        requests = [
            {
                "token_ids": prompt.token_ids,
                "output_mode": "text",
                "priority": position,
                "sampling_params": sampling | {"seed": first_seed(seed, step, position)},
            }
            for position, prompt in enumerate(prompts)
        ]

        async def generate_on(url: str, share: Sequence[Json]) -> list[Json]:
            async with self._connect(url) as engine:
                return await engine.generate(share, policy_version)

        shares = equal_shares(requests, len(self.base_urls))
        answers = chain.from_iterable(_run_all(map(generate_on, self.base_urls, shares)))
        return [
            _sample(prompt, choice, policy_version)
            for prompt, answer in zip(prompts, answers, strict=True)
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def describe_parameters(self) -> list[list[EngineReport]]:
        """Shape and dtype of the parameters of every worker of every engine."""

        async def describe(engine: Engine) -> list[EngineReport]:
            answers = await engine.ask("describe_parameters")
            return [answer["parameters"] for answer in answers]

        return self._on_all(describe)

    def connect(self, invitation: Json) -> None:
        """Have every worker of every engine make the links that `invitation` is for.

        Returns when all have made them or have failed, which `check_push` tells; those who send
        must make theirs meanwhile.
        """

        self._links = links = uuid.uuid4().hex

        async def connect(engine: Engine) -> None:
            await engine.connect(invitation, self.base_urls.index(engine.url), links)

        self._on_all(connect)

    def begin_push(self, push: str) -> None:
        """Pause the engines; from here on they hold no version, and drop what they have cached."""
        self._on_all(lambda engine: engine.begin_push(push, self._links))

    def receive_push(self, push: str) -> None:
        """Have every worker receive its shard; returns when all have, or have failed."""
        self._on_all(lambda engine: engine.ask("receive_push", push=push))

    def check_push(self, push: str, expected: Sequence[WorkerSums]) -> None:
        """Raise EngineError unless each worker of every engine has loaded `push` and holds weights
        of the checksums in `expected`, one for each worker of an engine."""
        reports = self._on_all(lambda engine: engine.ask("push_report"))
        check_reports(self.base_urls, reports, push, expected)

    def finish_push(self, push: str, policy_version: int) -> None:
        """Have every engine serve `push` as `policy_version`."""
        self._on_all(lambda engine: engine.finish_push(push, policy_version))
        self._on_all(lambda engine: engine.post("/resume"))

    def _on_all(self, action: Callable[[Engine], Coroutine[Any, Any, T]]) -> list[T]:
        async def on(url: str) -> T:
            async with self._connect(url) as engine:
                return await action(engine)

        return _run_all(map(on, self.base_urls))

    @asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator[Engine]:
        async with httpx.AsyncClient(
            base_url=url,
            headers=bearer(self.token),
            timeout=httpx.Timeout(self.request_timeout, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(),  # none: all requests of a generation are open at once
            trust_env=False,  # a proxy of the environment is not for engines
        ) as http:
            yield Engine(url, http)


def equal_shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`items` cut into `count` contiguous parts whose sizes differ by one at most."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, run at the same time; the first failure ends the others."""

    async def together() -> list[T]:
        return await asyncio.gather(*coroutines)

    return asyncio.run(together())


def _sample(prompt: Prompt, choice: Json, policy_version: int) -> Sample:
    return Sample(
        prompt=prompt,
        sample_index=choice["index"],
        completion_ids=tuple(choice["token_ids"]),
        logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
        finish_reason=choice["finish_reason"],
        text=choice["text"],
        policy_version=policy_version,
    )
