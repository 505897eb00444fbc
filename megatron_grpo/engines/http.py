"""The trainer's HTTP connection to an engine, and the exceptions for its failures."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from itertools import cycle

import httpx
import msgspec

from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer
from parallel.clock import run, stopped_time

HEALTH_TIMEOUT = 2.0
JSON_HEADERS = {"Content-Type": "application/json"}
EVENTS = "text/event-stream"
"""The type of an answer that is streamed."""
LAST_EVENT = b"[DONE]"
NUM_POOLS = 32
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=2.0)
"""Limits of each pool. Engines close a connection after 5 s without a request: before that it is
given up here."""


class ManyPools(httpx.AsyncBaseTransport):
    """Connection pools used in turn.

    httpx goes through all connections of a pool at every request and every answer: with one pool,
    the time that requests take of the trainer's process would grow with the square of their number.
    """

    def __init__(self) -> None:
        self._pools = [
            httpx.AsyncHTTPTransport(verify=_certificates(), limits=LIMITS)
            for _ in range(NUM_POOLS)
        ]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it by the next pool."""
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        async with AsyncExitStack() as stack:
            for pool in self._pools:
                stack.push_async_callback(pool.aclose)


def http_client(
    url: str, token: str, request_timeout: float, connect_timeout: float
) -> httpx.AsyncClient:
    """An HTTP client for the engine at `url`, without a limit on concurrent requests."""
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(token),
        timeout=httpx.Timeout(request_timeout, connect=connect_timeout),
        transport=ManyPools(),
        trust_env=False,  # ignore proxy settings of the environment
    )


def is_healthy(url: str, timeout: float = HEALTH_TIMEOUT) -> bool:
    """Whether the engine at `url` reports within `timeout` seconds that it is ready."""
    stopped = stopped_time()
    try:
        return httpx.get(
            f"{url}/health", timeout=timeout, trust_env=False, verify=_certificates()
        ).is_success
    except httpx.TimeoutException:  # of which the time in which this process was stopped is a part
        return stopped_time() > stopped and is_healthy(url, timeout)
    except httpx.TransportError:
        return False


def post(url: str, token: str, timeout: float) -> None:
    """POST to a server; raises httpx.HTTPError if that fails."""
    run(_post(url, token, timeout))


async def _post(url: str, token: str, timeout: float) -> None:
    async with httpx.AsyncClient(
        timeout=timeout, trust_env=False, verify=_certificates()
    ) as client:
        (await client.post(url, headers=bearer(token))).raise_for_status()


@asynccontextmanager
async def answer_to(
    http: httpx.AsyncClient,
    url: str,
    method: str,
    route: str,
    body: object,
    limit: httpx.Timeout | None,
) -> AsyncIterator[httpx.Response]:
    """The answer of the engine at `url`, whose body is not read yet; `body` None sends none.

    Raises EngineDown, EngineError and TimeoutError as `Engine` does.
    """
    engine = f"rollout engine {url}"
    limit = limit or http.timeout
    content = None if body is None else msgspec.json.encode(body)
    try:
        async with http.stream(
            method, route, content=content, headers=JSON_HEADERS, timeout=limit
        ) as response:
            if response.is_error:
                await response.aread()
                raise failure(url, route, response.status_code, response.text)
            yield response
    except httpx.ConnectTimeout as error:
        raise EngineDown(f"{engine} cannot be reached") from error
    except httpx.TimeoutException as error:
        raise TimeoutError(
            f"{engine} did not answer {route} within {limit.write:g} s (rollout.request_timeout)"
        ) from error
    except httpx.TransportError as error:
        reason = str(error) or "it closed the connection"
        raise EngineDown(f"{engine} cannot be reached at {route}: {reason}") from error


def failure(url: str, route: str, code: int, message: str) -> "EngineError":
    """The exception for an answer with an error status."""
    if code == httpx.codes.UNAUTHORIZED:
        return EngineDown(  # including an engine that was restarted meanwhile with another token
            f"rollout engine {url} refuses the token in {TOKEN_VARIABLE}: set it to the one that "
            "the engine was started with"
        )
    # A 5xx status is the engine's fault, any other the request's.
    kind = EngineDown if httpx.codes.is_server_error(code) else EngineError
    return kind(f"rollout engine {url} answered {route} with {code}: {message[:1000]}")


async def events_of(response: httpx.Response) -> AsyncIterator[bytearray]:
    """The data of each server-sent event that has arrived as a whole, of one line each.

    Not by httpx's lines: text in JSON may have characters that end lines of Unicode.
    """
    buffer = bytearray()
    async for piece in response.aiter_bytes():
        start = max(0, len(buffer) - 1)
        buffer += piece
        while (end := buffer.find(b"\n\n", start)) >= 0:
            yield buffer[:end].removeprefix(b"data: ")
            del buffer[: end + 2]
            start = 0


@cache
def _certificates() -> ssl.SSLContext:
    """Cached: loading the certificates takes longer than most requests to an engine."""
    return httpx.create_ssl_context(trust_env=False)


class EngineError(ConnectionError):
    """An engine died, refused a request, or gave a wrong answer; the message names the engine."""


class EngineDown(EngineError):
    """An engine is dead, hangs or is broken: its unanswered requests must go to another one."""


class EngineStale(EngineError):
    """An engine is healthy but holds no complete weights: it needs a push before it can serve."""


class NoServingEngine(EngineError):
    """No engine is serving now, but some may after the next push."""


class RolloutAborted(EngineError):
    """Generations have ended for good, on all ranks, which save and stop.

    Mostly because no engine serves and none came back in time; but also when rewards or
    environments fail. The message says why.
    """
