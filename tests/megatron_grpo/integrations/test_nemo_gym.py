"""An environment of NeMo Gym, unchanged, is trained: see docs/agents.md."""

import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.engines.live import wait_until
from helpers.runs.library_agents import PROJECT, Adapter, assert_token_for_token
from megatron_grpo.integrations.nemo_gym import url_of

VENV = PROJECT / ".venv-nemo-gym"
PYTHON = VENV / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-nemo-gym: see docs/agents.md"),
]
NAME = "example_single_tool_call"
"""An environment of the package, with a tool; whatever the model does is worth 1."""
AGENT = f"{NAME}_simple_agent"
SERVERS = (
    f"resources_servers/{NAME}",
    "responses_api_agents/simple_agent",
    "responses_api_models/vllm_model",
)


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


@contextmanager
def gym_servers(folder: Path, port: int, head_port: int):
    """The address of Gym's head server; its servers ask the policy model at `port`."""
    for server in SERVERS:  # one environment has them all, else Gym would make one each
        (folder / server).mkdir(parents=True)
        (folder / server / ".venv").symlink_to(VENV.resolve())
    model = {"--model-type": "vllm_model", "--model": "policy", "--model-api-key": "none"}
    model["--model-url"] = f"http://127.0.0.1:{port}/v1"
    settings = (
        f"+head_server={{host:127.0.0.1,port:{head_port}}}",
        f"+uv_venv_dir={folder}",
        "+skip_venv_if_present=true",
        "++policy_model.responses_api_models.vllm_model.replace_developer_role_with_system=true",
    )
    gym = [PYTHON.with_name("gym"), "env", "start", "--resources-server", NAME]
    command = [*gym, *(word for pair in model.items() for word in pair), *settings]
    with (
        (folder / "servers.log").open("w+") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as servers,
    ):
        ready = f"All {len(SERVERS)} / {len(SERVERS)} servers ready"
        try:
            assert wait_until(
                lambda: ready in Path(log.name).read_text() or servers.poll() is not None, 240
            )
            assert servers.poll() is None, Path(log.name).read_text()
            yield f"http://127.0.0.1:{head_port}"
        finally:
            servers.send_signal(signal.SIGTERM)


def test_episodes_of_nemo_gym_are_trained_on_token_for_token(tmp_path):
    dataset = next((VENV / "lib").glob(f"python*/site-packages/{SERVERS[0]}/data/example.jsonl"))
    port, head_port = free_ports(2)
    with gym_servers(tmp_path, port, head_port) as head:
        adapter = Adapter(PYTHON, "nemo_gym", AGENT, "--port", str(port), "--head", head)
        records = adapter.train(
            tmp_path, 5, "data.max_prompt_length=440", at_once=8, dataset=str(dataset)
        )
        with pytest.raises(ValueError, match=f"no agent other, but {AGENT}"):
            url_of("other", head)
    assert_token_for_token(records)
    assert [record["reward"] for record in records] == [1.0, 1.0]
