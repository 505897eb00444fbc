"""The trainer's HTTP connection to an engine."""

import ssl
from functools import cache

import httpx

from megatron_grpo.launch.job_token import bearer

HEALTH_TIMEOUT = 2.0
MAX_IDLE_CONNECTIONS = 16


def connect(
    url: str, token: str, request_timeout: float, connect_timeout: float
) -> httpx.AsyncClient:
    """An HTTP client for the engine at `url`, without a limit on concurrent requests.

    Few idle connections are kept: httpx compares all of them with each other at every request and
    answer, which takes half a minute for a thousand requests at once.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(token),
        timeout=httpx.Timeout(request_timeout, connect=connect_timeout),
        limits=httpx.Limits(max_keepalive_connections=MAX_IDLE_CONNECTIONS),
        trust_env=False,  # ignore proxy settings of the environment
        verify=_certificates(),
    )


def is_healthy(url: str, timeout: float = HEALTH_TIMEOUT) -> bool:
    """Whether the engine at `url` reports within `timeout` seconds that it is ready."""
    try:
        return httpx.get(
            f"{url}/health", timeout=timeout, trust_env=False, verify=_certificates()
        ).is_success
    except httpx.TransportError:
        return False


@cache
def _certificates() -> ssl.SSLContext:
    """Cached: loading the certificates takes longer than most requests to an engine."""
    return httpx.create_ssl_context(trust_env=False)
