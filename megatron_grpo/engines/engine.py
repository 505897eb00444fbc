"""The trainer's client of one rollout engine, over vLLM's HTTP routes."""

import asyncio
import json
import math
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
import msgspec

from megatron_grpo.engine_weights.protocol import LOADED, LOADED_VERSION
from megatron_grpo.engines.choice import (
    CUT,
    NOT_FINITE,
    Choice,
    Failure,
    decode_choice,
    decode_event,
    fault_of_chosen,
)
from megatron_grpo.engines.http import (
    EVENTS,
    LAST_EVENT,
    EngineDown,
    EngineError,
    EngineStale,
    answer_to,
    events_of,
    failure,
)
from megatron_grpo.engines.vllm.args import ADAPTER
from parallel.clock import running_time
from parallel.words import counted

PROBE_INTERVAL = 1.0
# Version label of samples while an engine holds no complete weights.
NO_VERSION = "none"
# Prometheus metrics, with one line for each replica behind the address.
COUNTS = {
    name: re.compile(rf"^vllm:{metric}(?:{{.*}})? (\S+)$", re.MULTILINE)
    for name, metric in {
        "generated": "generation_tokens_total",
        "started": "time_to_first_token_seconds_count",
        "waiting": "num_requests_waiting",
    }.items()
}

GENERATE = "/inference/v1/generate"
ROUTES_START = "routed_experts_prompt_start"
"""Sampling parameter: return routes from this token on."""
INDEX_TOPK = "index_topk"
"""Sampling parameter: return the positions of this number of tokens chosen by indexers."""
STREAM_INTERVAL = 256
"""Tokens in a chunk of a streamed answer, and the most that a completion loses with its engine.

A chunk costs rank 0's single thread as much time as a hundred tokens: shorter chunks would soon
keep it busy.
"""
Json = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """Numbers from an engine's metrics, over all its clients."""

    generated: float = 0.0
    """Tokens since its start."""
    started: float = 0.0
    """Requests since its start whose first token was generated."""
    waiting: float = 0.0
    """Requests that wait: not started, or preempted."""


@dataclass(frozen=True)
class Engine:
    """A connection to one engine, over vLLM's routes.

    Methods raise EngineDown when the engine is dead, hangs, fails or refuses the token; EngineStale
    when it lacks weights; EngineError when it refuses a request or answers it wrongly; TimeoutError
    when it is healthy but has not answered a request in time. All name the engine.
    """

    url: str
    http: aiohttp.ClientSession
    health_timeout: float
    """Seconds without an answer to a health probe until it counts as hung."""
    stall_timeout: float
    """Seconds without a sign of progress until it counts as hung."""
    serves_adapter: bool = False
    """Whether pushes bring an adapter, and the weights stay as loaded."""
    keeps_caches: bool = False
    """Whether requests in progress keep their keys and values through a push."""
    keeps_features: bool = True
    """Whether cached features of images outlive a push: the vision tower is not pushed."""

    async def complete(
        self,
        request: Json,
        versions: Callable[[], range],
        is_cut: Callable[[], bool] = lambda: False,
        begun: Choice | None = None,
    ) -> Choice:
        """Request a completion from weights of these `versions`.

        Its `finish_reason` is CUT if the engine aborted it while `is_cut()`. With an empty
        completion `begun`, the answer is streamed into it: what arrived is there even after an
        error.
        """
        if self.serves_adapter:
            request = {**request, "model": ADAPTER}
        has_routes = ROUTES_START in request["sampling_params"]
        try:
            # No limit: other requests may go first. `watch` notices an engine that hangs.
            if begun is None:
                choice = decode_choice(await self._request("POST", GENERATE, request, math.inf))
            else:
                choice = await self._stream(request, versions, begun)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"rollout engine {self.url} did not answer with a completion of "
                f"vLLM 0.32 or 0.33, or was started by another release of megatron-grpo: {error}"
            ) from error
        if choice.finish_reason == CUT and is_cut():
            self._check_tokens(choice, versions())
            if has_routes and not choice.routed_experts:
                # SGLang aborted it in its queue, where a push had put it: tokens without routes.
                return Choice.empty()
        else:
            self._check(choice, versions(), request["sampling_params"]["max_tokens"])
        if has_routes:
            self._check_routes(choice, request)
        return choice

    async def _stream(self, request: Json, versions: Callable[[], range], begun: Choice) -> Choice:
        """Stream the answer into `begun`; an engine that cannot stream sends it whole."""
        params = {**request["sampling_params"], "stream_interval": STREAM_INTERVAL}
        request = {**request, "stream": True, "sampling_params": params}
        answer = answer_to(self.http, self.url, "POST", GENERATE, request, math.inf)
        try:
            async with answer as response:
                if not response.headers["content-type"].startswith(EVENTS):
                    return decode_choice(await response.read())
                # Past LAST_EVENT to the end: aiohttp closes a connection with an unread rest.
                async for data in events_of(response):
                    if data == LAST_EVENT:
                        continue
                    chunk = decode_event(data)
                    if isinstance(chunk, Failure):
                        raise failure(self.url, GENERATE, chunk.code, chunk.message)
                    self._check_tokens(chunk, versions())
                    begun.append(chunk)
        except EngineDown:
            if begun.finish_reason == CUT:  # else the connection broke after the last chunk
                raise
        return begun

    async def watch(
        self, progress: Callable[[], object], note: Callable[[Counts], None] = lambda counts: None
    ) -> NoReturn:
        """Raise EngineDown once the engine hangs; until then, pass its counts to `note`.

        It hangs if a probe has no answer within `health_timeout` seconds and `progress()` did not
        change meanwhile (a server may be busy sending answers), or if for `stall_timeout` seconds
        it generates no token and `progress()` does not change.
        """
        seen, since = None, running_time()
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            before = progress()
            try:
                # /health first: an engine may answer /metrics while its core is dead.
                await self._request("GET", "/health", limit=self.health_timeout)
                counts = await self.counts(self.health_timeout)
            except TimeoutError:
                if progress() == before:
                    raise EngineDown(
                        f"rollout engine {self.url} did not answer within "
                        f"{self.health_timeout:g} s (rollout.health_timeout)"
                    ) from None
                continue
            note(counts)
            now = progress(), counts.generated
            if now != seen:
                seen, since = now, running_time()
            elif running_time() - since > self.stall_timeout:
                raise EngineDown(
                    f"rollout engine {self.url} made no progress for {self.stall_timeout:g} s "
                    "(rollout.stall_timeout)"
                )

    async def counts(self, limit: float | None = None) -> Counts:
        page = await self.metrics(limit)
        return Counts(**{name: sum(map(float, COUNTS[name].findall(page))) for name in COUNTS})

    async def metrics(self, limit: float | None = None) -> str:
        return (await self._request("GET", "/metrics", limit=limit)).decode()

    async def open_channels(self, transfer: Json, index: int, channels: str) -> None:
        """Make its workers open `channels` to all ranks that send to engine `index`; failures are
        in `push_report`."""
        info = {"transfer": transfer, "engine": index, "channels": channels}
        await self.ask_workers("open_channels", **info)

    async def begin_push(self, push: str, channels: str) -> None:
        """Pause the engine, and clear the weight version. Workers begin only if `channels` are
        their last ones: another trainer may have connected."""
        await self.pause()  # first: tokens sampled until then keep the label of their weights
        await self.post("/update_weight_version", {"new_version": NO_VERSION})
        await self.ask_workers("begin_push", push=push, channels=channels)

    async def finish_push(self, push: str, policy_version: int) -> None:
        """Mark the weights as those of `push`, and label samples with `policy_version`."""
        await self.ask_workers("finish_push", push=push)
        if self.serves_adapter:
            named = json.loads(await self._request("GET", "/v1/models"))["data"]
            # vLLM's first adapter gets `ADAPTER_ID`, which workers have registered: no file is
            # read, and `lora_path` need not exist.
            if ADAPTER not in [each["id"] for each in named]:
                body = {"lora_name": ADAPTER, "lora_path": ADAPTER}
                await self._request("POST", "/v1/load_lora_adapter", body)
        await self.post("/update_weight_version", {"new_version": str(policy_version)})

    async def sleep(self) -> None:
        """Free the memory of weights and cache until `wake`; weights are lost, or kept in host
        memory if pushes bring an adapter. ValueError if the engine was not started for that."""
        await self.post("/update_weight_version", {"new_version": NO_VERSION})
        if not all(answer["can_sleep"] for answer in await self.ask_workers("drop_weights")):
            raise ValueError(
                f"rollout engine {self.url} was started without rollout.enable_sleep_mode: start "
                "it with the config of the run, or with --enable-sleep-mode (--enable-memory-saver)"
            )
        await self.post(f"/sleep?level={1 if self.serves_adapter else 2}")

    async def wake(self, *parts: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` (default: both), if the engine sleeps."""
        await self.post("/wake_up?" + "&".join(f"tags={part}" for part in parts))

    async def serve_loaded(self) -> None:
        """Serve the weights of the engine's own folder, as LOADED_VERSION; raises EngineStale if a
        push has changed them."""
        await self.ask_workers("hold_loaded")
        if await self.held_push() != LOADED:
            raise EngineStale(
                f"rollout engine {self.url} no longer holds the weights that it loaded itself: "
                "a trainer has pushed others"
            )
        await self.post("/update_weight_version", {"new_version": str(LOADED_VERSION)})

    async def ask_workers(self, call: str, **arguments: Any) -> list[Json]:
        """Call `PushWorker.answer` in every worker; returns the answers in rank order."""
        # Each answer repeats the id of its question: after a failure in one worker, vLLM returns
        # the unread answers of the others to the next call. After a timeout it would, too, so that
        # the body has no `timeout`.
        question = uuid.uuid4().hex
        body = {
            "method": "answer_push",
            "kwargs": {"call": call, "question": question, **arguments},
        }
        answers: list[Any] = (await self.post("/collective_rpc", body))["results"]
        if not all(isinstance(a, dict) and a["question"] == question for a in answers):
            raise EngineDown(
                f"rollout engine {self.url}: its workers answered an earlier call than {call}, "
                "as happens after a call failed in one of them: restart it"
            )
        return answers

    async def push_of(self, policy_version: int) -> str:
        """Id of the push that the engine holds; raises unless it is of `policy_version`."""
        push = await self.held_push()
        if not push:
            raise EngineStale(
                f"rollout engine {self.url} holds no complete weights: it was restarted, or its "
                "last push failed or is under way; it can serve only after a successful push"
            )
        version = push.split("-")[0]
        if version != str(policy_version):
            raise EngineError(
                f"rollout engine {self.url} holds weights of version {version}, but version "
                f"{policy_version} was requested"
            )
        return push

    async def held_push(self) -> str:
        """Id of the push that all workers hold; empty if they hold none or different ones."""
        pushes = {answer["push"] for answer in await self.ask_workers("held_push")}
        return pushes.pop() if len(pushes) == 1 else ""

    async def num_open_requests(self) -> int:
        count: int = json.loads(await self._request("GET", "/load"))["server_load"]
        return count

    async def cut(self) -> None:
        """Hold back new requests, and end running ones with the tokens so far."""
        await self.post("/pause?mode=abort&clear_cache=false")

    async def pause(self) -> None:
        """Hold all requests until /resume, and empty the prefix cache. Requests in progress lose
        their keys and values as well, unless the engine `keeps_caches`."""
        # clear_cache=true would not say whether the cache was cleared; the call below does.
        await self.post("/pause?mode=keep&clear_cache=false")
        drop = "false" if self.keeps_caches else "true"
        if not (await self.post(f"/reset_prefix_cache?reset_running_requests={drop}"))["success"]:
            raise EngineError(f"rollout engine {self.url} could not reset its prefix cache")
        if not self.keeps_features:
            await self._request("POST", "/reset_encoder_cache")

    async def post(self, route: str, body: Json | None = None) -> Json:
        answer: Json = json.loads(await self._request("POST", route, body))
        return answer

    async def _request(
        self, method: str, route: str, body: Json | None = None, limit: float | None = None
    ) -> bytes:
        async with answer_to(self.http, self.url, method, route, body, limit) as response:
            return await response.read()

    def _check_routes(self, choice: Choice, request: Json) -> None:
        start = request["sampling_params"][ROUTES_START]
        index_topk = request["sampling_params"].get(INDEX_TOPK, 0)
        if not choice.routed_experts:
            names = ("the experts of tokens", "router_replay", "routed-experts")
            if index_topk:
                names = ("which tokens indexers choose", "indexer_replay", "indexer-topk")
            raise EngineError(
                f"rollout engine {self.url} does not return {names[0]}, which rollout.{names[1]} "
                f"true needs: start it with the same config, or with --enable-return-{names[2]}"
            )
        # - 1: the engine has sampled the last token, but never processed it.
        wanted = len(request["token_ids"]) + len(choice.token_ids) - 1 - start
        try:
            routes = choice.routes
        except ValueError as error:
            raise EngineError(f"rollout engine {self.url} returned no array: {error}") from None
        if len(routes) != wanted:
            raise EngineError(
                f"rollout engine {self.url} returned the routes of {counted(len(routes), 'token')} "
                f"instead of {wanted}"
            )
        if index_topk and (why := fault_of_chosen(routes, start, index_topk)):
            raise EngineError(f"rollout engine {self.url} returned {why}")

    def _check_tokens(self, choice: Choice, versions: range) -> None:
        found = [span.version for span in choice.weight_versions]
        allowed = [str(version) for version in versions]
        if choice.token_ids and not (found and {*found} <= {*allowed}):
            raise EngineError(
                f"rollout engine {self.url} sampled from weights of version "
                f"{', '.join(found)}, but version {' or '.join(allowed)} was requested"
            )
        if any(logprob <= NOT_FINITE for logprob in choice.token_logprobs):
            raise EngineError(
                f"rollout engine {self.url} returned a log-probability that is not finite"
            )

    def _check(self, choice: Choice, versions: range, max_tokens: int) -> None:
        self._check_tokens(choice, versions)
        if choice.finish_reason not in ("stop", "length"):
            raise EngineDown(  # such as `abort`, when the engine is shut down
                f"rollout engine {self.url} gave up a sample: {choice.finish_reason}"
            )
        if choice.finish_reason == "length" and len(choice.token_ids) < max_tokens:
            raise EngineError(
                f"rollout engine {self.url} ended a completion after {len(choice.token_ids)} of "
                f"{max_tokens} tokens: its context is too short; start it with a larger "
                "rollout.vllm.max_model_len (rollout.sglang.context_length), or lower "
                "rollout.max_completion_length"
            )
