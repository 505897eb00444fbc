"""Environments of the package verifiers as agents of a run with `agent.listen`.

    python -m megatron_grpo.integrations.verifiers rows TASKSET data.jsonl --most 1000
    python -m megatron_grpo.integrations.verifiers serve TASKSET runs/web/agents.json

Needs verifiers 0.4 (see `task_worker`). `--env` is verifiers' config of the environment in JSON,
without the id of the taskset. `rows` writes the tasks as data rows; `serve` runs episodes of tasks
that the run asks for, until it is over.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_grpo.integrations.task_worker import Json, parse, parser_of, serve, write_rows


def load(taskset: str, config: str) -> Any:
    """Load the environment of a taskset, with verifiers' config in JSON."""
    from verifiers.v1.utils import loaders  # noqa: PLC0415

    options = json.loads(config)
    options["taskset"] = {**options.get("taskset", {}), "id": taskset}
    kind = loaders.env_config_type(taskset, options.get("id", ""))
    return loaders.load_environment(kind.model_validate(options))


def rows_of(env: Any) -> Iterable[Json]:
    """One row for each task; its prompt is for logs and limits: the environment asks by itself."""
    for task in env.taskset:
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        yield {"prompt": text or task.key, "task": json.dumps(data)}


class Episodes:
    """Runs an episode of the environment for each task."""

    def __init__(self, env: Any) -> None:
        self._env, self._task_type = env, type(env.taskset).task_type()

    async def serve(self, file: Path, at_once: int) -> None:
        async with self._env.serving():
            await serve(file, self.act, at_once)

    async def act(self, task: Json) -> Json:
        """Run an episode; returns its report (`ending`)."""
        from verifiers.v1.clients import ModelContext  # noqa: PLC0415
        from verifiers.v1.configs.client import EvalClientConfig  # noqa: PLC0415
        from verifiers.v1.types import SamplingConfig  # noqa: PLC0415

        data = self._task_type.data_type().model_validate_json(task["row"]["task"])
        own = self._task_type(data, self._env.config.taskset.task)
        # The key is in the path: verifiers reads API keys from the process's environment, where all
        # episodes would share one.
        client = EvalClientConfig(
            base_url=f"{task['url']}/{task['key']}/v1", api_key_var="MEGATRON_GRPO_NO_KEY"
        )
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        [slot] = self._env.slots(own)
        return ending(await self._env.run_slot(slot, context))


def ending(episode: Any) -> Json:
    """Report of an episode: mean reward over the policy's traces, with metrics, or its errors."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {
            "error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "failed"
        }
    own = [trace for trace in episode.traces if trace.agent.trainable]
    if not own:
        return {"error": "the episode has no trace of a trainable agent"}
    metrics = {name: value for trace in own for name, value in trace.metrics.items()}
    return {"reward": sum(trace.reward for trace in own) / len(own), "metrics": metrics}


def main() -> None:
    parser = parser_of(__doc__, "id of a taskset for verifiers", at_once=64)
    parser.add_argument("--env", default="{}", help="config of the environment, in JSON")
    options = parse(parser)
    env = load(options.source, options.env)
    if options.action == "rows":
        write_rows(options.file, rows_of(env), options.most)
    else:
        asyncio.run(Episodes(env).serve(options.file, options.at_once))


if __name__ == "__main__":
    main()
