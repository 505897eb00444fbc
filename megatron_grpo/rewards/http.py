"""Requests of rewards that ask a model behind an HTTP address."""

import asyncio
import os
import random
import ssl
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.proxies import is_here, proxy_hint
from parallel.clock import running_time

DEFAULT_KEY = "OPENAI_API_KEY"
SHARE_OF_TIME = 0.9
"""Share of `reward.timeout` after which unanswered requests fail, so that other scores count."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 8.0
"""Exponential backoff before a request is sent again."""
RETRIED_STATUS_CODES = (408, 409, 429)
"""Status codes that, like 5xx, may be transient; the same as in OpenAI's own client."""
MAX_TEXT = 300


class Unscored(Exception):
    """A completion could not be scored."""


def check_base_url(base_url: str) -> None:
    """Raise ValueError unless the argument `base_url` is an address."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url {base_url!r} is not an address like http://host:8000/v1")


def key_from(api_key_env: str) -> str | None:
    """The key in this environment variable; only the default one may be missing."""
    key = os.environ.get(api_key_env)
    if key is None and api_key_env != DEFAULT_KEY:
        raise ValueError(f"api_key_env: the environment has no variable {api_key_env}: set it")
    return key


def http_client(base_url: str, key: str | None) -> httpx.AsyncClient:
    """A client without a limit of connections or time: each request gets the time that is left.

    Proxies of the environment are for addresses outside of this host.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        verify=_certificates(),
        limits=httpx.Limits(max_connections=None),
        timeout=None,
        trust_env=not is_here(base_url),
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Cached, since reading them takes longer than a request."""
    return httpx.create_ssl_context()


async def post(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], deadline: float
) -> httpx.Response:
    """The answer to `body`; raises Unscored if there is none before `deadline` (`running_time`).

    408, 409, 429, 5xx and lost connections are retried until then.
    """
    pause, last = FIRST_BACKOFF_SECONDS, "no answer"
    hint = proxy_hint(str(client.base_url)) if client.trust_env else ""
    while (left := deadline - running_time()) > 0:
        try:
            async with asyncio.timeout(left):
                response = await client.post(route, json=as_unicode(body))
            if response.is_success:
                return response
            last = f"status {response.status_code}: {response.text[:MAX_TEXT]}"
            if "json" not in response.headers.get("content-type", ""):  # what a server would send
                last += hint
            if response.status_code not in RETRIED_STATUS_CODES and not response.is_server_error:
                raise Unscored(f"{client.base_url} answered {last}")
        except (httpx.RequestError, TimeoutError) as error:
            last = repr(error) + hint
        # Jitter: requests that were turned away together do not all come back together.
        await asyncio.sleep(min(pause * random.uniform(0.5, 1), deadline - running_time()))
        pause = min(2 * pause, MAX_BACKOFF_SECONDS)
    raise Unscored(f"{client.base_url} gave no answer in time, at last {last}")
