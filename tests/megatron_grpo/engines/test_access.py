"""Only holders of the token can control an engine, and the token is not leaked."""

import asyncio
import json
import re
import socket
import time
import uuid
from pathlib import Path

import httpx
import psutil
import pytest

from demo.make_sums import sums
from helpers.engines.live import ReferenceServers, random_prompts
from helpers.runs.train import marked_processes, start_run
from megatron_grpo.engines.access import TokenGuard, check_host, is_allowed
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer
from reference_engine.server import ROUTES

pytestmark = pytest.mark.engines

TOKEN = "0123456789abcdef"
WITH_TOKEN = [(b"host", b"x"), (b"authorization", f"Bearer {TOKEN}".encode())]
OTHER = "fedcba9876543210"
# The client's routes, and other routes of vLLM that must not be open.
STATE_CHANGING = {
    "/pause",
    "/resume",
    "/collective_rpc",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/inference/v1/generate",
    "/sleep",
    "/abort_requests",
    "/v1/completions",
}


@pytest.fixture
def guard(monkeypatch):
    """The middleware around an application that records the scopes of its calls."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    reached = []

    async def app(scope, receive, send):
        reached.append(scope)

    guard = TokenGuard(app)
    guard.reached = reached
    return guard


def ask(guard: TokenGuard, kind: str, **scope) -> list[dict]:
    """Messages that the middleware itself sends in answer to a request."""
    answers = []

    async def send(message):
        answers.append(message)

    asyncio.run(guard({"type": kind} | scope, None, send))
    return answers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause"),
        ("GET", "/load"),
        ("OPTIONS", "/pause"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/health/../load"),
    ],
)
def test_token_guard_refuses_all_but_get_health_with_what_to_do(guard, method, path):
    scope = {"method": method, "path": path}
    start, body = ask(guard, "http", **scope, headers=[(b"host", b"x")])
    assert start["status"] == 401 and guard.reached == []
    assert int(dict(start["headers"])[b"content-length"]) == len(body["body"])
    message = json.loads(body["body"])["error"]["message"]
    assert "Authorization: Bearer TOKEN" in message and "MEGATRON_GRPO_TOKEN" in message
    assert TOKEN not in message
    assert ask(guard, "http", **scope, headers=WITH_TOKEN) == []
    assert [scope["path"] for scope in guard.reached] == [path]


def test_token_guard_wants_no_token_for_health_and_the_servers_own_start(guard):
    assert ask(guard, "http", method="GET", path="/health", headers=[]) == []
    assert ask(guard, "lifespan") == []
    assert len(guard.reached) == 2


@pytest.mark.parametrize("path", ["/v1/realtime", "/health"])
def test_token_guard_closes_a_websocket_before_it_is_accepted(guard, path):
    closed = [{"type": "websocket.close", "code": 1008}]
    assert ask(guard, "websocket", path=path, headers=[]) == closed
    assert guard.reached == []
    assert ask(guard, "websocket", path=path, headers=WITH_TOKEN) == []
    assert len(guard.reached) == 1


@pytest.mark.parametrize(
    "authorization",
    [b"", b"Bearer ", b"Bearer", TOKEN.encode(), b"Basic " + TOKEN.encode(), b"Bearer \xff\xe4"]
    + [f"Bearer {wrong}".encode() for wrong in (TOKEN[:-1], TOKEN + "0", OTHER, TOKEN.upper())],
)
def test_is_allowed_wants_the_whole_token(authorization):
    assert not is_allowed("POST", "/pause", authorization, TOKEN)


def test_token_guard_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(KeyError, match=TOKEN_VARIABLE):
        TokenGuard(None)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("0.0.0.0", "every network"),
        ("::", "every network"),
        ("::ffff:0.0.0.0", "every network"),
        ("", "is not an IP address"),
        ("0", "is not an IP address"),  # the C library reads it as 0.0.0.0
        ("localhost", "is not an IP address"),
        ("203.0.113.1", "is not an address of this host"),
    ],
)
def test_check_host_refuses_all_but_an_address_of_this_host(host, message):
    for own in ("127.0.0.1", "127.0.0.2", "::1"):
        check_host(own)
    with pytest.raises(ValueError, match=message) as refused:
        check_host(host)
    assert "127.0.0.1" in str(refused.value)


def test_check_host_refuses_a_port_that_is_taken_before_the_engine_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} of 127\.0\.0\.1: .*another --port"):
            check_host("127.0.0.1", port)
    check_host("127.0.0.1", port)


def connect(engine, headers: dict[str, str] | None = None) -> httpx.Client:
    url = engine.servers.base_urls[0]
    return httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)


def routes(engine) -> list[tuple[str, str]]:
    """Every method and path of a running engine."""
    if isinstance(engine.servers, ReferenceServers):
        return [(method, path) for path in ROUTES for method in ("GET", "POST")]
    with connect(engine, bearer(engine.servers.token)) as http:
        paths = http.get("/openapi.json").json()["paths"]
    listed = [
        (method.upper(), re.sub(r"\{.*?\}", "x", path))
        for path, operations in paths.items()
        for method in operations
    ]
    # Routes that the listing leaves out.
    return [*listed, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/metrics")]


@pytest.mark.long
def test_every_route_of_an_engine_wants_the_token(engine):
    guarded = set(routes(engine)) - {("GET", "/health")}
    is_reference = isinstance(engine.servers, ReferenceServers)
    has_all = engine.rollout.engine == "vllm" and not is_reference
    needed = STATE_CHANGING if has_all else STATE_CHANGING & ROUTES.keys()
    assert needed <= {path for _, path in guarded}
    for headers in ({}, bearer(OTHER), {"Authorization": engine.servers.token}):
        with connect(engine, headers) as http:
            for method, path in sorted(guarded):
                response = http.request(method, path, json={} if method == "POST" else None)
                assert response.status_code == 401, (method, path)
                if method != "HEAD":
                    assert "Authorization: Bearer TOKEN" in response.json()["error"]["message"]
            assert http.get("/health").status_code == 200
    with connect(engine, bearer(engine.servers.token)) as http:
        assert http.get("/load").json().keys() == {"server_load"}
    assert engine.generate(random_prompts(1))  # nothing was paused, dropped or renamed


def test_an_engine_listens_on_its_own_address_only_and_shows_no_token(engine):
    [running] = engine.servers.processes.values()
    server = psutil.Process(running.process.pid)
    listening = {
        connection.laddr.ip
        for member in [server, *server.children(recursive=True)]
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    token = engine.servers.token.encode()
    assert token not in b"".join(command_lines())
    assert running.log.exists() and token not in running.log.read_bytes()


def command_lines() -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines


SPY = """
import json, os
def spy(completions, **_):
    return [0.0] * len(completions)
with open({path!r}, "a") as file:  # when it is loaded: at preflight, and in the run
    print(json.dumps(dict(os.environ)), file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("given_by_address", [False, True])
def test_a_run_gives_its_token_to_its_engines_only(
    given_by_address, reference_engine, tied_model, tmp_path
):
    seen, run_dir, mark = tmp_path / "seen.jsonl", tmp_path / "run", uuid.uuid4().hex
    (tmp_path / "reward.py").write_text(SPY.format(path=str(seen)))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()))
    url = reference_engine.servers.base_urls[0]
    users = reference_engine.servers.token
    process = start_run(
        f"model.path={tied_model}",
        f"data.path={tmp_path / 'sums.jsonl'}",
        f"reward.functions=[{tmp_path / 'reward.py'}:spy]",
        f"train.run_dir={run_dir}",
        "train.num_steps=1",
        *([f"rollout.base_urls=[{url}]"] if given_by_address else []),
        mark=mark,
        token=users,  # unused by a run that starts its own engines
    )
    tokens, lines, deadline = {users}, set(), time.monotonic() + 200
    try:
        while process.poll() is None and time.monotonic() < deadline:
            lines.update(command_lines())
            for member in marked_processes(mark):
                tokens |= engine_tokens(member)
            time.sleep(0.1)
        output = process.communicate(timeout=60)[0]
    finally:
        for member in marked_processes(mark):
            member.kill()
    assert process.returncode == 0, output
    assert len(tokens) == (1 if given_by_address else 2)
    environments = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(environments) >= 2 and not any(TOKEN_VARIABLE in e for e in environments)
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl", "completions.jsonl"} <= {file.name for file in files}
    for token in tokens:
        assert token not in output and token not in seen.read_text()
        assert not [line for line in lines if token.encode() in line]
        assert not [file for file in files if token.encode() in file.read_bytes()]


def engine_tokens(process: psutil.Process) -> set[str]:
    """The token of `process`, if it is an engine."""
    try:
        is_engine = "vllm.entrypoints.openai.api_server" in process.cmdline()
        return {process.environ()[TOKEN_VARIABLE]} if is_engine else set()
    except psutil.Error:
        return set()
