"""One rollout engine, as the trainer speaks to it."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx

from megatron_grpo.job_token import TOKEN_VARIABLE
from megatron_grpo.rollout.engine_error import EngineError

POLL_INTERVAL = 0.01
# What vLLM sends in the place of a log-probability that is no number.
NOT_FINITE = -9999.0
# What samples bear while an engine holds no complete weights.
NO_VERSION = "none"

Json = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """An engine that we are connected to, by vLLM's routes.

    TimeoutError when it has not answered in time, ConnectionError when it cannot be reached,
    EngineError when its answer is an error or not what was asked for; all name it.
    """

    url: str
    http: httpx.AsyncClient

    async def generate(self, requests: Sequence[Json], policy_version: int) -> list[Json]:
        """The answers to `requests`, which the engine begins all at once, in the order of priority.

        The engine must hold complete weights of `policy_version` before, and those of the same push
        afterwards, so that they were there all the time.

        An engine that began with what had arrived by then would form other batches every time; sums
        would round differently, and now and then another token would be sampled.
        """
        push = await self._held_push(policy_version)
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
        if await self._held_push(policy_version) != push:
            raise EngineError(
                f"rollout engine {self.url} was given new weights while it generated: is another "
                "trainer using it?"
            )
        return answers

    async def connect(self, invitation: Json, index: int, links: str) -> None:
        """Have its workers make links, to be known as `links`, to all that send to engine `index`.

        Where that fails, the report of the push says so.
        """
        info = {"invitation": invitation, "engine": index, "links": links}
        await self.post("/init_weight_transfer_engine", {"init_info": info})

    async def begin_push(self, push: str, links: str) -> None:
        """Nothing runs from here on, so that nothing is cached, and the weights have no version.

        The workers begin only if `links` are still theirs: another trainer may have connected.
        """
        await self.pause()
        await self.post("/update_weight_version", {"new_version": NO_VERSION})
        await self.ask("begin_push", push=push, links=links)

    async def finish_push(self, push: str, policy_version: int) -> None:
        """Have the weights be those of `push`, and samples bear `policy_version`."""
        await self.ask("finish_push", push=push)
        await self.post("/update_weight_version", {"new_version": str(policy_version)})

    async def ask(self, method: str, **arguments: str) -> list[Json]:
        """What every worker answers, in the order of ranks, by a method of `PushWorker`.

        There is no time-out but that of the request: after one, vLLM would give the late answer to
        whoever asks next.
        """
        question = uuid.uuid4().hex
        body = {"method": method, "kwargs": arguments | {"question": question}}
        answers: list[Any] = (await self.post("/collective_rpc", body))["results"]
        if not all(isinstance(a, dict) and a["question"] == question for a in answers):
            raise EngineError(
                f"rollout engine {self.url}: its workers answer earlier questions than {method}, "
                "as after a call that failed in one of them: restart it"
            )
        return answers

    async def _held_push(self, policy_version: int) -> str:
        pushes = {answer["push"] for answer in await self.ask("held_push")}
        push = pushes.pop()
        if pushes or not push:
            raise EngineError(
                f"rollout engine {self.url} holds no complete weights: it was started anew, or its "
                "last push failed or is under way; only a push that succeeds makes it usable"
            )
        version = push.split("-")[0]
        if version != str(policy_version):
            raise EngineError(
                f"rollout engine {self.url} holds weights of version {version}, version "
                f"{policy_version} was asked for"
            )
        return push

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
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise EngineError(
                f"{engine} refuses the token in {TOKEN_VARIABLE}: give the one that the engine was "
                "started with"
            )
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
