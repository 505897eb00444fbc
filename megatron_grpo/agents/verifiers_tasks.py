"""Environments of the package verifiers as agents outside of a run, which has `agent.listen`.

    python -m megatron_grpo.agents.verifiers_tasks rows TASKSET data.jsonl --most 1000
    python -m megatron_grpo.agents.verifiers_tasks serve TASKSET runs/web/agents.json

It runs in an environment of its own, where verifiers 0.4 is installed and this project's folder is
on PYTHONPATH; nothing else of the project is imported. `--env` is verifiers' config of the
environment, in JSON, beside the name of its taskset. The first command writes the tasks as rows of
the data; the second acts on what the run asks for, unchanged, until the run is over.
"""

import argparse
import asyncio
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

WAIT_SECONDS = 60.0
"""Longer than the run takes to say that it has no task."""
AGAIN_SECONDS = 2.0
"""Between attempts to reach a run, which may be starting again."""
Json = dict[str, Any]


def load(taskset: str, config: str) -> Any:
    """The environment."""
    from verifiers.v1.utils import loaders  # noqa: PLC0415

    told = json.loads(config)
    told["taskset"] = {**told.get("taskset", {}), "id": taskset}
    kind = loaders.env_config_type(taskset, told.get("id", ""))
    return loaders.load_environment(kind.model_validate(told))


def rows_of(env: Any, most: int | None) -> Iterable[Json]:
    """One row for each task; its prompt is for logs and limits, as the environment asks itself."""
    for task in islice(env.taskset, most):
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        yield {"prompt": text or task.key, "task": json.dumps(data)}


class Worker:
    """Takes tasks of a run, and acts on each in an episode of the environment."""

    def __init__(self, env: Any, file: Path) -> None:
        self._env, self._file = env, file
        self._task_type = type(env.taskset).task_type()

    async def serve(self, at_once: int) -> None:
        """Act on up to `at_once` tasks at a time until the run is over and its file is gone."""
        async with self._env.serving(), httpx.AsyncClient(timeout=WAIT_SECONDS) as http:
            await asyncio.gather(*(self._take_tasks(http) for _ in range(at_once)))

    async def _take_tasks(self, http: httpx.AsyncClient) -> None:
        while told := self._told():
            url, headers = told["url"], {"Authorization": f"Bearer {told['token']}"}
            try:
                response = await http.post(f"{url}/tasks", headers=headers)
                if response.status_code == httpx.codes.NO_CONTENT:
                    continue
                task = response.raise_for_status().json()
                end = await self._end_of(task)
                await http.post(f"{url}/tasks/{task['key']}", headers=headers, json=end)
            except httpx.HTTPError:  # the run has ended, or starts again with another token
                await asyncio.sleep(AGAIN_SECONDS)

    async def _end_of(self, task: Json) -> Json:
        """What the run is told; whatever fails costs this task alone."""
        try:
            return await self._act(task)
        except Exception as error:  # of any kind: an environment is somebody else's code
            return {"error": repr(error)}

    def _told(self) -> Json | None:
        """The address and the token of the run; None when it is over."""
        try:
            told: Json = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        return told

    async def _act(self, task: Json) -> Json:
        """An episode: the reward of the traces that the policy has sampled, or why it failed."""
        from verifiers.v1.clients import ModelContext  # noqa: PLC0415
        from verifiers.v1.configs.client import EvalClientConfig  # noqa: PLC0415
        from verifiers.v1.types import SamplingConfig  # noqa: PLC0415

        data = self._task_type.data_type().model_validate_json(task["row"]["task"])
        own = self._task_type(data, self._env.config.taskset.task)
        # The key is in the path: verifiers reads keys from the environment of its process.
        client = EvalClientConfig(
            base_url=f"{task['url']}/{task['key']}/v1", api_key_var="MEGATRON_GRPO_NO_KEY"
        )
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        [slot] = self._env.slots(own)
        return ending(await self._env.run_slot(slot, context))


def ending(episode: Any) -> Json:
    """What the run is told of an episode."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {
            "error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "failed"
        }
    own = [trace for trace in episode.traces if trace.agent.trainable]
    metrics = {name: value for trace in own for name, value in trace.metrics.items()}
    return {"reward": sum(trace.reward for trace in own) / len(own), "metrics": metrics}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["rows", "serve"])
    parser.add_argument("taskset", help="its id for verifiers")
    parser.add_argument("file", type=Path, help="of the rows to write, or the run's agents.json")
    parser.add_argument("--env", default="{}", help="config of the environment, in JSON")
    parser.add_argument("--most", type=int, help="rows")
    parser.add_argument("--at-once", type=int, default=64, help="episodes at a time")
    options = parser.parse_args()
    if options.action == "serve" and not options.file.exists():
        parser.error(f"{options.file} does not exist: no run with agent.listen is there")
    env = load(options.taskset, options.env)
    if options.action == "rows":
        rows = rows_of(env, options.most)
        options.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        asyncio.run(Worker(env, options.file).serve(options.at_once))


if __name__ == "__main__":
    main()
