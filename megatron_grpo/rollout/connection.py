"""How the trainer reaches an engine by HTTP."""

import ssl
from functools import cache

import httpx

from megatron_grpo.launch.job_token import bearer

HEALTH_TIMEOUT = 2.0


def connect(
    url: str, token: str, request_timeout: float, connect_timeout: float
) -> httpx.AsyncClient:
    """A client of the engine at `url`; any number of requests may be open at once."""
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(token),
        timeout=httpx.Timeout(request_timeout, connect=connect_timeout),
        limits=httpx.Limits(),
        trust_env=False,  # a proxy of the environment is not for engines
        verify=_certificates(),
    )


def is_healthy(url: str, timeout: float = HEALTH_TIMEOUT) -> bool:
    """Whether the engine at `url` answers within `timeout` seconds that it is ready."""
    try:
        return httpx.get(
            f"{url}/health", timeout=timeout, trust_env=False, verify=_certificates()
        ).is_success
    except httpx.TransportError:
        return False


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: reading them takes longer than most answers of an engine."""
    return httpx.create_ssl_context(trust_env=False)
