"""HTTP requests of rewards that ask a model."""

import asyncio
import os
import random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.http import http_session, is_success, reason_of
from megatron_grpo.workers.proxies import proxy_hint, proxy_of
from parallel.clock import running_time

DEFAULT_KEY = "OPENAI_API_KEY"
SHARE_OF_TIME = 0.9
"""Share of `reward.timeout` after which open requests fail; the scores of answered ones count."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 8.0
"""Exponential backoff before a request is sent again."""
RETRIED_STATUS_CODES = (408, 409, 429)
"""Status codes that may be transient, like 5xx; OpenAI's own client retries these."""
MAX_TEXT = 300


class Unscored(Exception):
    """A completion could not be scored."""


def check_base_url(base_url: str) -> None:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url {base_url!r} is not an address like http://host:8000/v1")


def key_from(api_key_env: str) -> str | None:
    """Key in this environment variable; only the default variable may be missing."""
    key = os.environ.get(api_key_env)
    if key is None and api_key_env != DEFAULT_KEY:
        raise ValueError(f"api_key_env: the environment has no variable {api_key_env}: set it")
    return key


def http_client(base_url: str, key: str | None) -> aiohttp.ClientSession:
    """Session without a time-out: `post` limits each request to the time that is left."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http_session(base_url, headers, proxy=proxy_of(base_url))


async def post(
    client: aiohttp.ClientSession, base_url: str, route: str, body: dict[str, Any], deadline: float
) -> str:
    """Post `body` and return the answer, with retries (408, 409, 429, 5xx, lost connections) until
    `deadline` (of `running_time`); then raises Unscored."""
    pause, last = FIRST_BACKOFF_SECONDS, "no answer"
    hint = proxy_hint(base_url) if proxy_of(base_url) else ""
    content = msgspec.json.encode(as_unicode(body))
    while (left := deadline - running_time()) > 0:
        try:
            async with (
                asyncio.timeout(left),
                client.post(route, data=content, allow_redirects=False) as response,
            ):
                text = await response.text(errors="replace")
            if is_success(response.status):
                return text
            last = f"status {response.status}: {text[:MAX_TEXT]}"
            # OpenAI-compatible servers answer in JSON: this page may be a proxy's.
            if "json" not in response.content_type:
                last += hint
            if response.status not in RETRIED_STATUS_CODES and response.status < 500:
                raise Unscored(f"{base_url} answered {last}")
        except (aiohttp.ClientError, TimeoutError) as error:
            last = reason_of(error) + hint
        # Jitter: requests that were turned away together do not all come back together.
        await asyncio.sleep(min(pause * random.uniform(0.5, 1), deadline - running_time()))
        pause = min(2 * pause, MAX_BACKOFF_SECONDS)
    raise Unscored(f"{base_url} gave no answer in time, at last {last}")
