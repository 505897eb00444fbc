"""The trainer's HTTP connection to an engine, and the exceptions for its failures."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import aiohttp
import msgspec

from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer
from megatron_grpo.workers.http import http_session, is_success, reason_of
from parallel.clock import run

HEALTH_TIMEOUT = 2.0
EVENTS = "text/event-stream"
"""Content type of a streamed answer."""
LAST_EVENT = b"[DONE]"


def http_client(
    url: str, token: str, request_timeout: float, connect_timeout: float
) -> aiohttp.ClientSession:
    """Session with the engine at `url`, without the environment's proxies."""
    return http_session(url, bearer(token), request_timeout, connect_timeout)


def is_healthy(url: str, timeout: float = HEALTH_TIMEOUT) -> bool:
    """Whether the engine at `url` reports within `timeout` seconds that it is ready."""
    return is_success(status_of("GET", url, "/health", timeout)[0])


def status_of(
    method: str, url: str, route: str, timeout: float, token: str = ""
) -> tuple[int, str]:
    """HTTP status and text, such as (200, "200 OK"); (0, reason) without an answer. It blocks."""

    async def ask() -> tuple[int, str]:
        try:
            async with (
                http_session(url, bearer(token) if token else {}, timeout, timeout) as http,
                http.request(method, route.lstrip("/"), allow_redirects=False) as response,
            ):
                return response.status, f"{response.status} {response.reason}"
        except aiohttp.ClientError as error:
            return 0, reason_of(error)

    return run(ask())


@asynccontextmanager
async def answer_to(
    http: aiohttp.ClientSession,
    url: str,
    method: str,
    route: str,
    body: object = None,
    limit: float | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request to the engine at `url`; yields the response before its body is read.

    `limit`: seconds until the response, and between two parts of its body; by default the limit of
    `http`. Raises EngineDown, EngineError and TimeoutError.
    """
    engine = f"rollout engine {url}"
    limit = limit or http.timeout.sock_read or math.inf
    connect = http.timeout.connect
    seconds = None if limit == math.inf else limit
    try:
        async with (
            # aiohttp's `sock_read` does not limit an engine that stops reading the request.
            asyncio.timeout(seconds and seconds + (connect or 0.0)) as until_begun,
            http.request(
                *(method, route.lstrip("/")),
                data=None if body is None else msgspec.json.encode(body),
                timeout=aiohttp.ClientTimeout(connect=connect, sock_read=seconds),
                allow_redirects=False,
            ) as response,
        ):
            until_begun.reschedule(None)  # from here on `sock_read` limits each part
            if response.status >= 400:
                text = await response.text(errors="replace")
                raise failure(url, route, response.status, text)
            yield response
    except aiohttp.ConnectionTimeoutError as error:  # which is a TimeoutError, too
        raise EngineDown(f"{engine} cannot be reached") from error
    except TimeoutError as error:
        raise TimeoutError(
            f"{engine} did not answer {route} within {limit:g} s (rollout.request_timeout)"
        ) from error
    except aiohttp.ClientError as error:
        raise EngineDown(f"{engine} cannot be reached at {route}: {reason_of(error)}") from error


def failure(url: str, route: str, code: int, message: str) -> "EngineError":
    """The exception for an answer with an error status."""
    if code == HTTPStatus.UNAUTHORIZED:
        return EngineDown(  # it may have been restarted with another token
            f"rollout engine {url} refuses the token in {TOKEN_VARIABLE}: set it to the one that "
            "the engine was started with"
        )
    # A 5xx status is the engine's fault, any other the request's.
    kind = EngineDown if code >= 500 else EngineError
    return kind(f"rollout engine {url} answered {route} with {code}: {message[:1000]}")


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytearray]:
    """Yield the data of each complete server-sent event; every event has one line."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        start = max(0, len(buffer) - 1)  # a separator may be split between two pieces
        buffer += piece
        while (end := buffer.find(b"\n\n", start)) >= 0:
            yield buffer[:end].removeprefix(b"data: ")
            del buffer[: end + 2]
            start = 0


class EngineError(ConnectionError):
    """An engine died, refused a request, or gave a wrong answer; the message names the engine."""


class EngineDown(EngineError):
    """An engine is dead, hangs or is broken: its open requests must go to another engine."""


class EngineStale(EngineError):
    """An engine is healthy but holds no complete weights: it needs a push before it can serve."""


class NoServingEngine(EngineError):
    """No engine is serving now, but some may after the next push."""


class RolloutAborted(EngineError):
    """No more generations: no engine came back in time, or rewards or environments fail. All ranks
    save and stop."""
