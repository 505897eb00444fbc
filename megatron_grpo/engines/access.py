"""Access control of a rollout engine: a bearer token, on one address of its host.

An engine's routes make it compute, load other weights and call methods of its workers by name. So
every route except GET /health requires the header `Authorization: Bearer TOKEN`. This keeps out
other users of the machine and the network, but not eavesdroppers: nothing is encrypted.
"""

import errno
import hmac
import json
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv6Address, ip_address
from typing import Any

from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer

REFUSAL = json.dumps(
    {
        "error": {
            "message": "every route except GET /health requires the header 'Authorization: Bearer "
            f"TOKEN', with the {TOKEN_VARIABLE} that this engine was started with"
        }
    }
).encode()
"""The body of a 401 response."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_host(host: str, port: int = 0) -> None:
    """Raise ValueError unless `host` is one IP address of this machine, on which `port` is free."""
    try:
        address = ip_address(host)
    except ValueError:
        raise ValueError(
            f"--host {host!r} is not an IP address: an engine listens on one address of its host, "
            "such as 127.0.0.1"
        ) from None
    family = socket.AF_INET
    if isinstance(address, IPv6Address):
        # ::ffff:0.0.0.0 is every network as well, though its own `is_unspecified` is False.
        family, address = socket.AF_INET6, address.ipv4_mapped or address
    if address.is_unspecified:
        raise ValueError(
            f"--host {host} would listen on every network of this host: give the one address that "
            "trainers connect to, or 127.0.0.1 for trainers on this host"
        )
    try:
        with socket.socket(family) as probe:
            # As in vLLM's launcher: connections of an engine that has just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"another process listens on port {port} of {host}: end it, or choose another "
                "--port, which trainers then have in rollout.base_urls"
            ) from None
        raise ValueError(
            f"--host {host} is not an address of this host ({error.strerror}): give one that it "
            "has, such as 127.0.0.1"
        ) from None


def is_allowed(method: str, route: str, authorization: bytes, token: str) -> bool:
    if (method, route) == ("GET", "/health"):
        return True
    return hmac.compare_digest(authorization, bearer(token)["Authorization"].encode())


class TokenGuard:
    """ASGI middleware that answers requests without the token with 401 instead of calling `app`.

    vLLM's API server creates it from `--middleware`. KeyError without a token in the environment:
    the engine does not start.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.token = os.environ[TOKEN_VARIABLE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server's own start and end
            await self.app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        # A websocket has no method.
        if is_allowed(scope.get("method", ""), scope["path"], authorization, self.token):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closed before it is accepted: the server answers the handshake with 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
