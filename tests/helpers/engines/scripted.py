"""Scripted engines behind a real client."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np

from checkpoint_convert import read_shape
from demo.make_sums import sums
from helpers.engines.mock_session import MockSession
from helpers.engines.sampling import event_loop
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.choice import npy_of
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.engine import GENERATE, ROUTES_START, Engine
from megatron_grpo.engines.http import EVENTS
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.launch.run_dir import new_token
from megatron_grpo.rollout.generation import ScoredGroup
from megatron_grpo.rollout.services import RolloutServices
from parallel import ParallelDims

MAX_LENGTH = 8
"""Longest completion of `scripted_services`, in tokens."""


@dataclass
class ScriptedEngine:
    """Answers requests unless it `holds` them, and reports the metrics in `counts`.

    A sampled token equals its position in the sequence; its expert is the engine's `version`.
    """

    counts: dict[str, float] = field(default_factory=dict)
    is_mute: bool = False
    silent_route: str = ""
    """A route that is never answered."""
    delays: dict[str, float] = field(default_factory=dict)
    """Seconds before a route is answered."""
    broken_route: str = ""
    """A route that always fails, with this `fault`."""
    fault: type[aiohttp.ClientError] = aiohttp.ClientConnectionError
    num_per_look: int = 1000
    """Largest number of requests that arrive between two calls of /load."""
    num_cut_tokens: int = 2
    """Length of a completion that an abort cuts."""
    num_streamed: int = 0
    """Tokens of each completion that are streamed one by one; the next chunk stays incomplete until
    the engine is broken. 0: no streaming."""
    num_read: int = 0
    """Number of requests that have received their streamed tokens."""
    version: int = 7
    push: str = ""
    """The push that it reports; "": the first push of its version."""
    stall_timeout: float = 60.0
    is_paused: bool = False
    num_cuts: int = 0
    num_accepted: int = 0
    holds: bool = True
    first_held: int = 0
    """Requests with a lower priority number are answered even while others are held."""
    num_given_up: int = 0
    """Number of requests with a connection that closed before the answer."""
    asked: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """`max_tokens` of each request."""
    temperatures: list[float] = field(default_factory=list)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == self.silent_route:
            await asyncio.Event().wait()
        goes_on = path in ("/resume", "/wake_up")
        self.is_paused = path == "/pause" or (self.is_paused and not goes_on)
        await asyncio.sleep(self.delays.get(path, 0))
        if path == self.broken_route:
            raise self.fault("it is broken")
        match path:
            case "/metrics" | "/health" if self.is_mute:
                raise aiohttp.SocketTimeoutError("no answer")
            case "/metrics":
                lines = [f"vllm:{name} {count}\n" for name, count in self.counts.items()]
                return httpx.Response(200, text="".join(lines))
            case "/collective_rpc":
                question = json.loads(request.content)["kwargs"]["question"]
                held = {"push": self.push or f"{self.version}-a"}
                return httpx.Response(200, json={"results": [held | {"question": question}]})
            case "/inference/v1/generate":
                try:
                    return await self._complete(json.loads(request.content))
                except asyncio.CancelledError:
                    self.num_given_up += 1
                    raise
            case "/pause":
                self.num_cuts += "mode=abort" in str(request.url)
            case "/load":
                self.num_accepted = min(len(self.asked), self.num_accepted + self.num_per_look)
        return httpx.Response(200, json={"server_load": self.num_accepted, "success": True})

    async def _complete(self, request: dict[str, Any]) -> httpx.Response:
        self.asked.append(request["priority"])
        self.num_tokens.append(request["sampling_params"]["max_tokens"])
        self.temperatures.append(request["sampling_params"]["temperature"])
        if self.num_streamed and request.get("stream"):
            headers = {"Content-Type": EVENTS}
            return httpx.Response(200, headers=headers, content=self._stream(request))
        num_cuts, version = self.num_cuts, self.version
        while num_cuts == self.num_cuts and (
            self.is_paused or (self.holds and request["priority"] >= self.first_held)
        ):
            await asyncio.sleep(0.002)  # a test may set it in another thread
        count, reason = request["sampling_params"]["max_tokens"], "length"
        if num_cuts < self.num_cuts:
            count, reason = self.num_cut_tokens, "abort"
        first = len(request["token_ids"])
        routed = request["sampling_params"].get(ROUTES_START, first + count - 1)
        routes = np.full((first + count - 1 - routed, 1, 1), self.version, np.uint8)
        choice = {
            # SGLang has no experts for a completion that still waits to be recomputed after a push.
            "routed_experts": b64encode(npy_of(routes)).decode()
            if reason != "abort" or version == self.version
            else None,
            "weight_versions": [{"version": str(self.version), "start": 0, "end": count}],
            "finish_reason": reason,
            "text": "",
            "token_ids": [*range(first, first + count)],
            "logprobs": {"content": [{"logprob": -0.5}] * count},
        }
        return httpx.Response(200, json={"choices": [choice]})

    async def _stream(self, request: dict[str, Any]) -> AsyncIterator[bytes]:
        first = len(request["token_ids"])
        for count in range(1, self.num_streamed + 2):
            version = {"version": str(self.version), "start": 0, "end": count}
            chunk = {
                "weight_versions": [version],
                "finish_reason": None,
                "text": "\u2028",  # JSON does not escape this line separator
                "token_ids": [first + count - 1],
                "logprobs": {"content": [{"logprob": -0.5}]},
            }
            event = json.dumps({"choices": [chunk]}, ensure_ascii=False).encode()
            yield b"data: " + event + (b"\n\n" if count <= self.num_streamed else b"")
        self.num_read += 1
        while self.broken_route != GENERATE:
            await asyncio.sleep(0.002)
        raise aiohttp.ClientConnectionError("it is broken")

    def told(self, *, generated: int, started: int, waiting: int) -> None:
        self.counts = {
            "generation_tokens_total": generated,
            "time_to_first_token_seconds_count": started,
            "num_requests_waiting": waiting,
        }


URL = "http://127.0.0.1:1"  # nothing listens there


class NoServers:
    """Replaces the processes of engine servers; none ever ends."""

    token = "token"

    def __init__(self, are_ours: bool, *base_urls: str) -> None:
        self.are_ours, self.base_urls = are_ours, base_urls or (URL,)

    def no_end(self, url: str) -> str:
        return ""

    kill = restart = end = log_tail = no_end


class ScriptedClient(RolloutClient):
    """A client of scripted engines, keyed by name, which all serve."""

    def __init__(self, **engines: ScriptedEngine) -> None:
        self._scripts = {f"http://{name}": engine for name, engine in engines.items()}
        self.urls = [*self._scripts]
        rollout = RolloutConfig(max_completion_length=16)
        servers = NoServers(False, *self.urls)
        super().__init__(EnginePool(servers, rollout), rollout, event_loop())
        self.pool.finish_push(self.urls)

    def engine(self, url: str) -> Engine:
        http = MockSession(url, self._scripts[url].respond)
        return Engine(url, http, 5.0, self._scripts[url].stall_timeout)


class Scores:
    """Scores each sample by its index in the group; raises `error` if it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.value = 1.0
        self.is_equal: Callable[[int], bool] = lambda index: False
        """Whether all completions of this prompt index get the same reward."""
        self.num_scored = 0

    def __call__(self, samples) -> list[ScoredGroup]:
        if self.error:
            raise self.error
        self.num_scored += len(samples)
        groups = [samples[i : i + 4] for i in range(0, len(samples), 4)]
        values = [
            [0.0 if self.is_equal(s.prompt.index) else self.value * s.sample_index for s in group]
            for group in groups
        ]
        return [
            ScoredGroup(group, [{"share_of_digits": value} for value in each], each)
            for group, each in zip(groups, values, strict=True)
        ]


@contextmanager
def scripted_services(model: Path, folder: Path, *overrides: str) -> Iterator[RolloutServices]:
    """Services with a scripted engine that holds its requests, and with `Scores` as rewards. Pushes
    are in flight; a generation has 4 completions of each of 4 prompts."""
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()), encoding="utf-8")
    cfg = tiny_config(
        model,
        ParallelDims(),
        f"data.path={data}",
        f"train.run_dir={folder / 'run'}",
        "train.num_steps=20",
        "rollout.base_urls=[http://127.0.0.1:9]",  # gets no request
        "rollout.in_flight_updates=true",
        "grpo.old_logprobs=rollout",
        "rollout.max_staleness=2",
        f"rollout.max_completion_length={MAX_LENGTH}",
        *overrides,
    )
    with closing(RolloutServices(cfg, read_shape(model), new_token(), num_ranks=1)) as services:
        services.score = services.scorer.score_now = Scores()
        use(services, ScriptedEngine(version=0))
        yield services


def use(services: RolloutServices, engine: ScriptedEngine, name: str = "only") -> None:
    """Replace the engine of `services`, with a new client and router in the same loop."""
    client = ScriptedClient(**{name: engine})
    client.loop, services.engines, services.engine = services.loop, client, engine
    services.router = RequestRouter(client, lambda tokens: "")
