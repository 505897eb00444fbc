"""An environment of NeMo Gym, unchanged, is trained: see docs/agents.md."""

import asyncio
import json
import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from helpers.engines.live import wait_until
from helpers.runs.library_agents import PROJECT, Adapter, assert_token_for_token
from megatron_grpo.integrations.nemo_gym import PARAMS, Episodes, url_of

VENV = PROJECT / ".venv-nemo-gym"
PYTHON = VENV / "bin" / "python"
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


def test_a_streamed_answer_stays_a_stream(tmp_path):
    file, [port] = tmp_path / "agents.json", free_ports(1)
    events, asked, reports = b"data: {}\n\ndata: [DONE]\n\n", [], []

    async def take(request):
        row = {"task": json.dumps({PARAMS: {}})}
        return web.json_response({"key": "k", "url": f"http://{request.host}", "row": row})

    async def act(request):  # as an agent of Gym
        body = {"metadata": (await request.json())[PARAMS]["metadata"], "stream": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with ClientSession() as http, http.post(url, json=body) as answer:
            asked.append((answer.content_type, await answer.read()))
        return web.json_response({"reward": 1, "files": 3, "is_right": True, "why": "text"})

    async def answer(_):
        return web.Response(body=events, content_type="text/event-stream")

    async def finish(request):
        file.unlink()  # the run is over
        reports.append(await request.json())
        return web.Response()

    async def episode():
        run = web.Application()
        routes = {"/tasks": take, "/tasks/k": finish, "/run": act, "/k/v1/chat/completions": answer}
        for path, handler in routes.items():
            run.router.add_post(path, handler)
        runner = web.AppRunner(run)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0])
        file.write_text(json.dumps({"url": url, "token": "t"}))
        await Episodes(url).serve(file, port, 1)
        await runner.cleanup()

    asyncio.run(episode())
    assert asked == [("text/event-stream", events)]
    assert reports == [{"reward": 1, "metrics": {"files": 3, "is_right": True}}]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-nemo-gym: see docs/agents.md")
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
