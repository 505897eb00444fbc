"""The processes in which agents act."""

import json
import subprocess
import sys
from contextlib import closing

import pytest

from helpers.engines.live import random_prompts
from helpers.engines.proxies import DEAD, set_proxies
from helpers.runs.agents import FUNCTIONS, MCP_SERVER
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.actors import checked, run_command
from megatron_grpo.agents.agents import actor_pool, try_agent
from megatron_grpo.config.file import load_config

LIGHT = """
import sys, threading
import megatron_grpo.agents.actors, megatron_grpo.agents.fork_server
heavy = {"torch", "numpy", "transformers", "aiohttp", "openai"}
print(sorted(heavy & sys.modules.keys()))
megatron_grpo.agents.actors.Actor.load(None, None, ["python"], [], {"sandbox": "none"})
print([thread.name for thread in threading.enumerate()])
"""

FIRST_REQUEST = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from megatron_grpo.agents.actors import Actor

class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

who = {
    "command": None,
    "function": None,
    "tools": ["python"],
    "mcp_servers": sys.argv[1:],
    "max_tool_characters": 9,
    "python_arguments": {"sandbox": "none"},
}
endpoint = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=endpoint.serve_forever, daemon=True).start()
Actor.load(**who)
known = {*sys.modules}
url = f"http://127.0.0.1:{endpoint.server_port}"
Actor(**who).run_episode(url, "key", {}, [{"role": "user", "content": "hi"}])
imported = sorted({*sys.modules} - known)
Actor.load(**who | {"mcp_servers": ["any"]})
print(json.dumps([imported, "mcp" in sys.modules]))
"""

TALKATIVE = """
import json, os, sys
row = json.load(sys.stdin)
print("x" * 100_000)
print(os.environ["A"], row["b"], sep="")
"""


COMMAND = """
import openai
openai.OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[])
"""


def tried(*settings: str) -> None:
    """Try an agent as `check` does."""
    cfg = load_config(TINY_CONFIG, ["data.max_prompt_length=100", *settings])
    with closing(actor_pool(cfg)) as pool:
        pool.wait_ready([])
        try_agent(pool, cfg.agent, random_prompts(1)[0])


SOCKS = "socks5://127.0.0.1:9"
"""A SOCKS proxy: HTTP clients would need another package for it, and must not use it."""


@pytest.mark.parametrize(
    ("agent", "proxies"),
    [
        ("function={}:append", {"http_proxy": DEAD, "no_proxy": ".corp"}),
        ("function={}:append", {"ALL_PROXY": SOCKS}),
        ("command={} {}", {"HTTP_PROXY": DEAD}),
        ("command={} {}", {"all_proxy": DEAD, "no_proxy": ".corp"}),
    ],
)
def test_an_agent_reaches_the_endpoint_whatever_proxy_is_set(agent, proxies, tmp_path, monkeypatch):
    set_proxies(monkeypatch, **proxies)
    (file := tmp_path / "agent.py").write_text(COMMAND if "command" in agent else FUNCTIONS)
    names = [sys.executable, file] if "command" in agent else [file]
    tried("agent." + agent.format(*names))


TOOLS = ["agent.weight=0", "rollout.tool_call_parser=hermes"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["agent.command=python nowhere.py"], "exit code 2; (.|\n)*nowhere.py"),
        (["agent.command=sh -c 'exit 127'"], "row 0: it ended with exit code 127"),
        (["agent.command=sh -c true"], "it ended without asking for a turn"),
        (["agent.command=FOLDER/plain"], "program .*/plain is not executable"),
        (["agent.command=FOLDER/nowhere"], "program .*/nowhere does not exist"),
        (["agent.function=FOLDER/agent.py:silent"], "it ended without asking for a turn"),
        (["agent.function=FOLDER/broken.py:solve"], "broken.py.*\n(.|\n)*JSONDecodeError"),
        ([*TOOLS, "agent.tools=[FOLDER/broken.py:solve]"], "agent.tools .*(.|\n)*JSONDecodeErr"),
        ([*TOOLS, "agent.mcp_servers=[nowhere --x]"], "agent.mcp_servers: 'nowhere --x' cannot be"),
    ],
)
def test_an_agent_that_cannot_start_is_refused_with_the_reason(
    settings, error, tmp_path, monkeypatch
):
    set_proxies(monkeypatch, http_proxy=DEAD)  # must not be named as the cause
    (tmp_path / "agent.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text('import json\njson.loads("")\n')
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match=error) as raised:
        tried(*(setting.replace("FOLDER", str(tmp_path)) for setting in settings))
    assert "NO_PROXY" not in str(raised.value)


def test_a_late_agent_passes_but_a_late_mcp_server_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_grpo.agents.agents.TRIAL_SECONDS", 0.5)
    (file := tmp_path / "agent.py").write_text(FUNCTIONS)
    tried(f"agent.function={file}:wait")
    with pytest.raises(ValueError, match=r"agent\.mcp_servers sleep 60: not ready after 0\.5 s"):
        tried(*TOOLS, "agent.mcp_servers=[sleep 60]")


def test_the_process_that_agents_are_forked_from_imports_nothing_heavy_and_has_one_thread():
    assert subprocess.check_output([sys.executable, "-c", LIGHT]) == b"[]\n['MainThread']\n"


@pytest.mark.parametrize("has_server", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_agent_is_forked_after_its_imports(has_server, tmp_path):
    (server := tmp_path / "mcp_numbers.py").write_text(MCP_SERVER)
    servers = [f"{sys.executable} {server}"] * has_server
    output = subprocess.check_output([sys.executable, "-c", FIRST_REQUEST, *servers], text=True)
    imported, has_client = json.loads(output.splitlines()[-1])
    assert imported == [] or (has_server and imported == ["anyio._core._subprocesses"])
    assert has_client, "with a server of tools, each agent would import its client"


def test_run_command_gives_a_program_its_row_and_reads_the_reward_in_its_last_line():
    assert run_command([sys.executable, "-c", TALKATIVE], {"A": "1"}, {"b": 5}) == 15
    assert run_command([sys.executable, "-c", "pass"], {}, {"b": "x" * 200_000}) is None
    fails = "import sys; print('why', file=sys.stderr); sys.exit(3)"
    for code, error in (
        (fails, "exit code 3; .*\nwhy"),
        ("print('no reward')", "no reward in JSON: 'no reward'"),
    ):
        with pytest.raises(ValueError, match=error):
            run_command([sys.executable, "-c", code], {}, {})


def test_checked_takes_a_reward_with_or_without_metrics():
    assert checked(1) == {"reward": 1.0, "metrics": {}}
    assert checked({"metrics": {"files": 3}}) == {"reward": None, "metrics": {"files": 3.0}}
    for wrong in ("1", [1], float("nan"), {"reward": "x"}, {"metrics": [1]}):
        with pytest.raises(ValueError, match=r"its (reward|metrics)"):
            checked(wrong)
