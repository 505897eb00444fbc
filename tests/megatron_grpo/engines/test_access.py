"""Only holders of the token can control an engine, and the token is not leaked."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from helpers.engines import random_prompts
from megatron_grpo.engines.access import TokenGuard, check_host, is_allowed
from megatron_grpo.engines.transformers_server import ROUTES
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer

TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"
# The routes that the client uses, and others of vLLM's that must not be open.
UPDATES = {"start_weight_update", "update_weights", "finish_weight_update", "update_weight_version"}
OTHERS = {"inference/v1/generate", "v1/completions", "sleep", "abort_requests", "pause", "resume"}
STATE_CHANGING = {f"/{n}" for n in UPDATES | OTHERS | {"collective_rpc", "reset_prefix_cache"}}
HEALTH = ("GET", "/health")


@pytest.fixture
def ask(monkeypatch):
    """Sends a request through the middleware; returns its own answers and whether it passed on."""

    def ask(kind: str, path: str, authorization: bytes | None = None, **scope):
        answers, reached = [], []

        async def app(scope, receive, send):
            reached.append(scope["path"])

        async def send(message):
            answers.append(message)

        headers = [(b"host", b"x")]
        headers += [] if authorization is None else [(b"authorization", authorization)]
        scope |= {"type": kind, "path": path, "headers": headers}
        asyncio.run(TokenGuard(app)(scope, None, send))
        return answers, reached == [path]

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(KeyError, match=TOKEN_VARIABLE):
        TokenGuard(None)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return ask


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause"),
        ("OPTIONS", "/pause"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/health/../load"),
    ],
)
def test_all_but_get_health_is_refused_with_what_to_do(ask, method, path):
    (start, body), is_served = ask("http", path, method=method)
    assert start["status"] == 401 and not is_served
    assert int(dict(start["headers"])[b"content-length"]) == len(body["body"])
    message = json.loads(body["body"])["error"]["message"]
    assert "Authorization: Bearer TOKEN" in message and "MEGATRON_GRPO_TOKEN" in message
    assert TOKEN not in message
    assert ask("http", path, f"Bearer {TOKEN}".encode(), method=method) == ([], True)


def test_health_and_the_servers_own_start_need_no_token(ask):
    assert ask("http", "/health", method="GET") == ([], True)
    assert ask("lifespan", "") == ([], True)


@pytest.mark.parametrize("path", ["/v1/realtime", "/health"])
def test_a_websocket_is_closed_before_it_is_accepted(ask, path):
    assert ask("websocket", path) == ([{"type": "websocket.close", "code": 1008}], False)
    assert ask("websocket", path, f"Bearer {TOKEN}".encode()) == ([], True)


@pytest.mark.parametrize(
    "authorization",
    [b"", b"Bearer ", TOKEN.encode(), b"Basic " + TOKEN.encode(), b"Bearer \xff\xe4"]
    + [f"Bearer {wrong}".encode() for wrong in (TOKEN[:-1], TOKEN + "0", OTHER, TOKEN.upper())],
)
def test_only_the_whole_token_is_allowed(authorization):
    assert not is_allowed("POST", "/pause", authorization, TOKEN)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("0.0.0.0", "every network"),
        ("::", "every network"),
        ("::ffff:0.0.0.0", "every network"),
        ("0", "is not an IP address"),  # which the C library takes for 0.0.0.0
        ("localhost", "is not an IP address"),
        ("203.0.113.1", "is not an address of this host"),
    ],
)
def test_an_address_that_is_not_one_of_this_host_is_refused_with_a_legal_one(host, message):
    for legal in ("127.0.0.2", "::1"):
        check_host(legal)
    with pytest.raises(ValueError, match=message) as refused:
        check_host(host)
    assert "127.0.0.1" in str(refused.value)


def connect(engine, headers: dict[str, str]) -> httpx.Client:
    url = engine.servers.base_urls[0]
    return httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)


def routes(engine) -> set[tuple[str, str]]:
    """Every method and path of a running engine that must be guarded."""
    if engine.rollout.engine == "transformers":
        return {(method, path) for path in ROUTES for method in ("GET", "POST")} - {HEALTH}
    with connect(engine, bearer(engine.servers.token)) as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert paths.keys() >= STATE_CHANGING
    listed = {
        (method.upper(), re.sub(r"\{.*?\}", "x", path))
        for path, operations in paths.items()
        for method in operations
    }
    # With those that the list leaves out.
    return {*listed, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/metrics")} - {HEALTH}


def test_every_route_of_an_engine_wants_the_token(engine):
    for headers in ({}, bearer(OTHER), {"Authorization": engine.servers.token}):
        with connect(engine, headers) as http:
            for method, path in sorted(routes(engine)):
                response = http.request(method, path, json={} if method == "POST" else None)
                assert response.status_code == 401, (method, path)
                assert "Authorization: Bearer TOKEN" in response.json()["error"]["message"]
            assert http.get("/health").status_code == 200
    with connect(engine, bearer(engine.servers.token)) as http:
        assert http.get("/load").json() == {"server_load": 0}
    assert engine.generate(random_prompts(1))  # nothing was paused, dropped or renamed


def test_an_engine_listens_on_its_own_address_only_and_its_token_is_not_to_be_seen(engine):
    [running] = engine.servers._engines
    tree = [psutil.Process(running.process.pid)]
    tree += tree[0].children(recursive=True)
    connections = [each for member in tree for each in member.net_connections("inet")]
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    token = engine.servers.token.encode()
    assert token not in b"".join(command_lines())
    assert running.log.exists() and token not in running.log.read_bytes()


def command_lines() -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines.append(file.read_bytes())
    return lines
