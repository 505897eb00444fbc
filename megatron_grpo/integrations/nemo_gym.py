"""Environments of NeMo Gym as agents of a run with `agent.listen`.

    python -m megatron_grpo.integrations.nemo_gym rows DATASET.jsonl data.jsonl --most 1000
    python -m megatron_grpo.integrations.nemo_gym serve AGENT runs/web/agents.json --port 8701

Needs the package nemo-gym (see `task_worker`) and Gym's running servers; AGENT names one of them.
Gym's policy model is its own `vllm_model`, with `policy_base_url` http://127.0.0.1:8701/v1: this
process, which forwards each request to its session. The session's key is in the request's metadata,
which Gym's agents copy from the task's `responses_create_params`.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import httpx
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from megatron_grpo.integrations.task_worker import Json, parse, parser_of, serve, write_rows
from megatron_grpo.workers.proxies import is_here

LOOPBACK = "127.0.0.1"
MAX_BODY = 64 << 20
PARAMS = "responses_create_params"
SESSION = "megatron_grpo_session"
"""Name of the metadata field with the key of a session."""
NO_SESSION = f"no task has this metadata.{SESSION}: the agent must send the metadata of {PARAMS}"


def rows_of(dataset: Path) -> Iterable[Json]:
    """One data row for each row of a Gym dataset; its prompt is for logs and limits only."""
    with dataset.open(encoding="utf-8") as lines:
        for line in lines:
            asked = json.loads(line)[PARAMS]["input"]
            text = asked if isinstance(asked, str) else json.dumps(asked)
            yield {"prompt": text, "task": line.strip()}


def url_of(agent: str, head: str) -> str:
    """Ask Gym's head server for the address of an agent; raises ValueError if it has none."""
    import yaml  # noqa: PLC0415

    answer = httpx.get(f"{head}/global_config_dict_yaml", trust_env=not is_here(head))
    config = yaml.safe_load(answer.json())
    kind = "responses_api_agents"
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    agents = {name: table[kind] for name, table in tables.items() if kind in table}
    if agent not in agents:
        raise ValueError(f"Gym at {head} has no agent {agent}, but {', '.join(sorted(agents))}")
    [server] = agents[agent].values()
    return f"http://{server['host']}:{server['port']}"


class Episodes:
    """Has a Gym agent act on tasks, and forwards the requests of its policy model to the run."""

    def __init__(self, agent_url: str) -> None:
        self._agent_url = agent_url
        self._urls: dict[str, str] = {}
        """Address of the run for each open session, by its key."""

    async def serve(self, file: Path, port: int, at_once: int) -> None:
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_post("/v1/chat/completions", self._send_on)
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, port).start()
        # aiohttp's defaults, 100 connections and 5 minutes, are too few for `at_once` episodes.
        connector, forever = TCPConnector(limit=0), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=forever) as self._http:
            await serve(file, self.act, at_once)
        await runner.cleanup()

    async def act(self, task: Json) -> Json:
        """Run an episode; returns its reward, and other numbers (true: 1) as metrics."""
        row, key = json.loads(task["row"]["task"]), task["key"]
        metadata = row[PARAMS].get("metadata") or {}
        row[PARAMS]["metadata"] = {**metadata, SESSION: key}
        self._urls[key] = task["url"]
        try:
            async with self._http.post(f"{self._agent_url}/run", json=row) as answer:
                if not answer.ok:
                    return {"error": await answer.text()}
                answered: Json = await answer.json()
        finally:
            del self._urls[key]
        new = {name: value for name, value in answered.items() if name not in row}
        metrics = {name: value for name, value in new.items() if isinstance(value, int | float)}
        return {"reward": metrics.pop("reward"), "metrics": metrics}

    async def _send_on(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = (body.get("metadata") or {}).get(SESSION)
        if key not in self._urls:
            return web.json_response({"error": {"message": NO_SESSION}}, status=400)
        url = f"{self._urls[key]}/{key}{request.path}"
        async with self._http.post(url, json=body) as answer:
            kind = answer.headers["Content-Type"]  # JSON, or the events of `stream: true`
            return web.Response(
                body=await answer.read(), status=answer.status, headers={"Content-Type": kind}
            )


def main() -> None:
    parser = parser_of(__doc__, "file of a dataset of Gym, or name of its agent", at_once=64)
    parser.add_argument("--port", type=int, default=8701, help="of this process's endpoint")
    parser.add_argument("--head", default=f"http://{LOOPBACK}:11000", help="Gym's head server")
    options = parse(parser)
    if options.action == "rows":
        write_rows(options.file, rows_of(Path(options.source)), options.most)
    else:
        episodes = Episodes(url_of(options.source, options.head))
        asyncio.run(episodes.serve(options.file, options.port, options.at_once))


if __name__ == "__main__":
    main()
