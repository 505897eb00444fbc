"""An environment of OpenEnv, unchanged, is trained: see docs/agents.md."""

import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from helpers.adapters import PROJECT, Adapter, assert_token_for_token
from helpers.engines import wait_until

BIN = PROJECT / ".venv-openenv" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BIN.exists(), reason="needs .venv-openenv: see docs/agents.md"),
]
TURNS = 3


@contextmanager
def echo_server(folder: Path):
    """The address of the environment that `openenv init` makes: it echoes, and is never done."""
    subprocess.run([BIN / "openenv", "init", "echoes"], cwd=folder, check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [BIN / "uvicorn", "echoes.server.app:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder) as server:
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


def test_its_episodes_are_trained_on_token_for_token(tmp_path):
    with echo_server(tmp_path) as url:
        adapter = Adapter(BIN / "python", "openenv_tasks", url)
        records = adapter.train(
            tmp_path, 8, "data.max_prompt_length=400", f"agent.max_turns={TURNS}", at_once=1
        )
    assert_token_for_token(records)
    for record in records:
        assert record["num_turns/mean"] == TURNS
        assert 0 < record["reward"] <= TURNS  # of each turn, a tenth of its characters, at most 1
