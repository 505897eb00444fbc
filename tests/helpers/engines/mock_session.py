"""An HTTP session that answers without an engine."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx

Respond = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


class MockSession:
    """Replaces aiohttp's session; `respond` answers, or raises one of aiohttp's errors."""

    def __init__(self, url: str, respond: Respond) -> None:
        self._url, self._respond = url, respond
        self.timeout = aiohttp.ClientTimeout(connect=5.0, sock_read=5.0)

    async def __aenter__(self) -> "MockSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def close(self) -> None:
        pass

    @asynccontextmanager
    async def request(
        self,
        method: str,
        route: str,
        data: bytes | None,
        timeout: aiohttp.ClientTimeout,
        **_: Any,
    ) -> AsyncIterator[SimpleNamespace]:
        url, limits = f"{self._url}/{route}", {"timeout": {"read": timeout.sock_read}}
        answer = self._respond(httpx.Request(method, url, content=data, extensions=limits))
        response = await answer if isawaitable(answer) else answer

        async def text(errors: str) -> str:
            return (await response.aread()).decode(errors=errors)

        yield SimpleNamespace(
            status=response.status_code,
            headers=response.headers,
            read=response.aread,
            text=text,
            content=SimpleNamespace(iter_any=response.aiter_bytes),
        )
