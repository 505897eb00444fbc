"""HTTP sessions with engines, and with models of reward functions."""

import ssl
from collections.abc import Mapping
from functools import cache

import aiohttp
import certifi

KEEP_ALIVE_SECONDS = 2.0
"""Less than the 5 s after which engines close idle connections: requests sent just then are lost.
"""


def http_session(
    base_url: str,
    headers: Mapping[str, str],
    read_timeout: float | None = None,
    connect_timeout: float | None = None,
    proxy: str | None = None,
) -> aiohttp.ClientSession:
    """A session for routes below `base_url`, with JSON bodies and any number of open requests.

    It ignores the environment's proxies.
    """
    return aiohttp.ClientSession(
        base_url.rstrip("/") + "/",
        headers={"Content-Type": "application/json", **headers},
        timeout=aiohttp.ClientTimeout(connect=connect_timeout, sock_read=read_timeout),
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=_certificates()
        ),
        proxy=proxy,
    )


def is_success(status: int) -> bool:
    """Whether a status is 2xx; a redirection is no success."""
    return 200 <= status < 300


def reason_of(error: Exception) -> str:
    """The reason of a failed request, without addresses: a proxy's may hold a password."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "no valid address"
    error = getattr(error, "os_error", error)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@cache
def _certificates() -> ssl.SSLContext:
    """Certificates of the host, of SSL_CERT_FILE, and of certifi, for containers without any."""
    # Cached: loading takes longer than most requests.
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
