"""HTTP sessions with engines, and with models that rewards ask."""

import ssl
from collections.abc import Mapping
from functools import cache

import aiohttp
import certifi

KEEP_ALIVE_SECONDS = 2.0
"""Engines close a connection after 5 s without a request, and lose one that is sent just then."""


def http_session(
    base_url: str,
    headers: Mapping[str, str],
    read_timeout: float | None = None,
    connect_timeout: float | None = None,
    proxy: str | None = None,
) -> aiohttp.ClientSession:
    """A session for routes below `base_url`, without a limit on concurrent requests.

    Bodies are JSON. All coroutines of the event loop may use it. It takes no proxy from the
    environment.
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
    """Whether a status code is one of success; a redirection is none."""
    return 200 <= status < 300


def reason_of(error: Exception) -> str:
    """The reason of a failed request, without addresses: that of a proxy may hold a password."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status} {error.message}"
    if isinstance(error, aiohttp.InvalidURL):
        return "no valid address"
    error = getattr(error, "os_error", error)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@cache
def _certificates() -> ssl.SSLContext:
    """Certificates of the host, of SSL_CERT_FILE, and of certifi, as a container may have none.

    Cached: loading them takes longer than most requests.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
