"""An environment of OpenEnv, unchanged, is trained: see docs/agents.md."""

import json
import socket
import subprocess
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from helpers.engines.live import wait_until
from helpers.runs.library_agents import PROJECT, Adapter, assert_token_for_token

BIN = PROJECT / ".venv-openenv" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BIN.exists(), reason="needs .venv-openenv: see docs/agents.md"),
]
TURNS = 3


ADDITION = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Pair(Action):
    a: int
    b: int

class Sum(Observation):
    total: int = 0
    note: str | None = None

class Addition(Environment):
    state = State()

    def reset(self, seed=None, **_):
        return Sum()

    def step(self, action, **_):
        total = action.a + action.b
        return Sum(total=total, reward=total / 10, done=total == 5)

class AdditionByTool(MCPEnvironment):
    state = State()

    def __init__(self):
        server = FastMCP("addition")

        @server.tool
        def add(a: int, b: int) -> int:
            return a + b

        super().__init__(server)

    def reset(self, seed=None, **_):
        return Observation(reward=0.5)

    def _step_impl(self, action, **_):
        raise NotImplementedError

act = create_app(Addition, Pair, Sum)
add = create_app(AdditionByTool, CallToolAction, CallToolObservation)
"""


@contextmanager
def serving(folder: Path, application: str):
    """The address of an environment's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with subprocess.Popen(
        [BIN / "uvicorn", application, "--port", str(port)], cwd=folder
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            assert wait_until(lambda: is_up(url) or server.poll() is not None, 120)
            yield url
        finally:
            server.kill()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.ConnectError:
        return False


def test_episodes_of_openenv_are_trained_on_token_for_token(tmp_path):
    # It echoes, and is never done.
    subprocess.run([BIN / "openenv", "init", "echoes"], cwd=tmp_path, check=True)
    with serving(tmp_path, "echoes.server.app:app") as url:
        adapter = Adapter(BIN / "python", "openenv", url)
        records = adapter.train(
            tmp_path, 8, "data.max_prompt_length=400", f"agent.max_turns={TURNS}", at_once=1
        )
    assert_token_for_token(records)
    for record in records:
        assert record["num_turns/mean"] == TURNS
        assert 0 < record["reward"] <= TURNS  # per turn a tenth of its characters, at most 1


def calls(name: str, *arguments: str) -> dict[str, Any]:
    """A model's message that calls a tool."""
    made = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


WRONG = "Server error: Invalid message (code: VALIDATION_ERROR)"


class ScriptedRun(BaseHTTPRequestHandler):
    """A run with one task; `answers` are the model's messages."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        run = self.server
        if self.path == "/tasks":
            reply = {"key": "k", "url": run.url, "row": {}, "messages": run.messages}
        elif self.path == "/tasks/k":
            run.end, reply = json.loads(body), {}
            run.file.unlink()
        else:
            run.messages = json.loads(body)["messages"]
            choice = {"index": 0, "message": run.answers.pop(0), "finish_reason": "stop"}
            reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy"}
            reply["choices"] = [choice]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


@pytest.mark.parametrize(
    ("tool", "options", "first", "results", "reward"),
    [
        ("act", [], '{"total": 0}', ['{"total": 3}', WRONG], 0.8),
        ("act", ["--observe", "note"], "Reach 5.", ["", WRONG], 0.8),  # no such field
        ("add", [], "Reach 5.", ["3", "3 validation errors for call[add]"], 0.5),
    ],
)
def test_an_action_that_is_no_text_is_a_call(tmp_path, tool, options, first, results, reward):
    (tmp_path / "addition.py").write_text(ADDITION)
    right = calls(tool, '{"a": 2, "b": 3}')
    run = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedRun)
    run.url, run.file = f"http://127.0.0.1:{run.server_port}", tmp_path / "agents.json"
    run.messages = [{"role": "user", "content": "Reach 5."}]
    run.answers = [
        calls(tool, '{"a": 1, "b": 2}', "{"),
        right,
        {"role": "assistant", "content": "It is 5."},
    ]
    run.file.write_text(json.dumps({"url": run.url, "token": "t"}))
    with run, serving(tmp_path, f"addition:{tool}") as url:
        Thread(target=run.serve_forever, daemon=True).start()
        made = Adapter(BIN / "python", "openenv", url, *options)
        with made.start("serve", run.file) as adapter:
            assert wait_until(lambda: adapter.poll() is not None, 60)
            adapter.kill()
        run.shutdown()
    assert run.end == {"reward": pytest.approx(reward)}
    assert run.messages[0]["content"] == first
    observed = [each["content"] for each in run.messages if each["role"] == "tool"]
    for text, result in zip(observed, results, strict=False):
        assert text.startswith(result)
