"""The trainer's side of the rollout engines: prompts out and samples back, new weights out."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx

from megatron_grpo.prompts import Prompt
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.rollout.samples import Sample, first_seed

CONNECT_TIMEOUT = 5.0
POLL_INTERVAL = 0.01
# What vLLM sends in the place of a log-probability that is no number.
NOT_FINITE = -9999.0

Json = dict[str, Any]
T = TypeVar("T")


class RolloutClient:
    """Speaks vLLM's HTTP routes with all engines at once.

    Any failure raises and names the engine: ConnectionError when it cannot be reached, TimeoutError
    when it has not answered within `request_timeout` seconds, EngineError when its answer is an
    error or not what was asked for.
    """

    def __init__(
        self, base_urls: Sequence[str], request_timeout: float, eos_token_ids: Sequence[int]
    ) -> None:
        self.base_urls = tuple(base_urls)
        self.request_timeout = request_timeout
        self.eos_token_ids = tuple(eos_token_ids)

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

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Load the weights in `folder` into every engine, which from then serves `policy_version`.

        Engines drop what they cached under older weights.
        """

        async def update(url: str) -> None:
            async with self._connect(url) as engine:
                await engine.update_weights(folder.resolve(), policy_version)

        _run_all(map(update, self.base_urls))

    @asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator["Engine"]:
        async with httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(self.request_timeout, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(),  # none: all requests of a generation are open at once
            trust_env=False,  # a proxy of the environment is not for engines
        ) as http:
            yield Engine(url, http)


@dataclass(frozen=True)
class Engine:
    """An engine that we are connected to."""

    url: str
    http: httpx.AsyncClient

    async def generate(self, requests: Sequence[Json], policy_version: int) -> list[Json]:
        """The answers to `requests`, which the engine begins all at once, in the order of priority.

        An engine that began with what had arrived by then would form other batches every time; sums
        would round differently, and now and then another token would be sampled.
        """
        await self.pause()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.post("/inference/v1/generate", request))
                    for request in requests
                ]
                while (await self.get("/load"))["server_load"] < len(tasks):
                    await asyncio.sleep(POLL_INTERVAL)
                await self.post("/resume")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        answers = [task.result() for task in tasks]
        for choice in chain.from_iterable(answer["choices"] for answer in answers):
            self._check(choice, policy_version)
        return answers

    async def update_weights(self, folder: Path, policy_version: int) -> None:
        """Load `folder` and name it; nothing runs meanwhile, so that nothing is cached either."""
        await self.pause()
        await self.post("/start_weight_update")
        await self.post("/update_weights", {"update_info": {"folder": str(folder)}})
        await self.post("/finish_weight_update", {"weight_version": str(policy_version)})
        await self.post("/resume")

    async def pause(self) -> None:
        """Hold new requests back until /resume, and forget what was computed for earlier ones."""
        await self.post("/pause?mode=keep&clear_cache=false")  # below we hear if it succeeded
        if not (await self.post("/reset_prefix_cache"))["success"]:
            raise EngineError(f"rollout engine {self.url} could not drop its prefix cache")

    async def get(self, route: str) -> Json:
        """The answer of a GET route."""
        return await self._call("GET", route)

    async def post(self, route: str, body: Json | None = None) -> Json:
        """The answer of a POST route."""
        return await self._call("POST", route, body)

    async def _call(self, method: str, route: str, body: Json | None = None) -> Json:
        engine = f"rollout engine {self.url}"
        try:
            response = await self.http.request(method, route, json=body)
        except httpx.ConnectTimeout as error:
            raise ConnectionError(f"{engine} cannot be reached") from error
        except httpx.TimeoutException as error:
            raise TimeoutError(
                f"{engine} did not answer {route} within {self.http.timeout.read:g} s "
                "(rollout.request_timeout)"
            ) from error
        except httpx.TransportError as error:
            reason = str(error) or "it hung up"
            raise ConnectionError(f"{engine} cannot be reached at {route}: {reason}") from error
        if response.is_error:
            raise EngineError(
                f"{engine} answered {route} with {response.status_code}: {response.text[:1000]}"
            )
        answer: Json = response.json()
        return answer

    def _check(self, choice: Json, policy_version: int) -> None:
        versions = [span["version"] for span in choice["weight_versions"]]
        if versions != [str(policy_version)]:
            raise EngineError(
                f"rollout engine {self.url} sampled from weights of version {', '.join(versions)}, "
                f"version {policy_version} was asked for"
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineError(
                f"rollout engine {self.url} gave up a sample: {choice['finish_reason']}"
            )
        if any(token["logprob"] <= NOT_FINITE for token in choice["logprobs"]["content"]):
            raise EngineError(
                f"rollout engine {self.url} returned a log-probability that is not finite"
            )


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
