"""Environments of OpenEnv as agents of a run with `agent.listen`.

    python -m megatron_grpo.integrations.openenv rows http://127.0.0.1:8000 data.jsonl --most 1000
    python -m megatron_grpo.integrations.openenv serve http://127.0.0.1:8000 runs/web/agents.json

Needs the package openenv (see `task_worker`) and the running server of the environment. The model
gets each observation: as text if it is one text, else as JSON. If the environment's action is one
text, the model's answer is the action. Other actions are tool calls: of the environment's own tools
(MCP), or of `act`, with the fields of the action as arguments. `rows` writes one row for each seed;
`serve` acts until the run is over.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from megatron_grpo.integrations.task_worker import Json, parse, parser_of, serve, write_rows
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.proxies import is_here

ACT = "act"
INVALID = "VALIDATION_ERROR"
"""Code of a server's answer to wrong arguments; the model gets the error."""
NOT_SHOWN = ("done", "reward", "metadata")
"""Fields that OpenEnv adds to each observation."""


class Episodes:
    """Acts on tasks, each in its own session with the environment's server."""

    def __init__(self, url: str, observe: str | None) -> None:
        """`observe` is the field of observations to show to the model; None: all fields."""
        self._url, self._observe = url, observe
        answer = httpx.get(f"{url}/schema", trust_env=not is_here(url))
        action = answer.raise_for_status().json()["action"]
        fields = {name: field for name, field in action["properties"].items() if name != "metadata"}
        self._has_tools = fields.get("type", {}).get("const") == "call_tool"
        needed = action.get("required", [])
        texts = [name for name in needed if fields[name].get("type") == "string"]
        is_text = not self._has_tools and texts == needed and len(needed) == 1
        self._text_field = texts[0] if is_text else None
        described = action.get("description", "")
        self._act = _tool(ACT, described, {**action, "properties": fields})

    async def rows(self, most: int, arguments: Json) -> list[Json]:
        """Rows of seeds with arguments of `reset`; the first observation is the prompt."""
        rows = []
        async with self._session() as env:
            for seed in range(most):
                options = {"seed": seed, **arguments}
                shown = self._shown((await env.reset(**options)).observation)
                rows.append({"prompt": shown or f"seed {seed}", "reset": json.dumps(options)})
        return rows

    async def act(self, task: Json) -> Json:
        """Play until the environment or the model ends, or a limit; returns the sum of rewards."""
        from openai import (  # noqa: PLC0415
            AsyncOpenAI,
            BadRequestError,
            DefaultAsyncHttpxClient,
        )

        url, key = f"{task['url']}/v1", task["key"]
        http = DefaultAsyncHttpxClient(trust_env=False)  # no proxies: the run is reached directly
        # No retries and no time-out: a retry would be one more turn of the session.
        model: Any = AsyncOpenAI(
            base_url=url, api_key=key, max_retries=0, timeout=None, http_client=http
        )
        async with self._session() as env, model:
            options = task["row"].get("reset") or "{}"
            result = await env.reset(**json.loads(options))
            rewards, messages = [result.reward], self._opening(task, result.observation)
            tools = {} if self._text_field else {"tools": await self._tools(env)}
            while not result.done:
                try:
                    answer = await model.chat.completions.create(
                        model="policy", messages=messages, **tools
                    )
                except BadRequestError as error:
                    if error.code is None:  # a wrong request; limits of the session have codes
                        raise
                    break
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not (actions := self._actions(message)):
                    break
                for action, reply in actions:
                    try:
                        result = await env.step(action)
                    except RuntimeError as error:
                        # Wrong arguments of a call go back to the model; a text action has none.
                        if INVALID not in str(error) or self._text_field:
                            raise
                        messages.append({**reply, "content": str(error)})
                        continue
                    messages.append({**reply, "content": self._shown(result.observation)})
                    rewards.append(result.reward)
                    if result.done:
                        break
        given = [reward for reward in rewards if reward is not None]
        return {"reward": sum(given) if given else None}

    def _session(self) -> Any:
        from openenv.core.generic_client import GenericEnvClient  # noqa: PLC0415

        return GenericEnvClient(self._url)

    def _opening(self, task: Json, observation: Json) -> list[Json]:
        """First messages: a non-empty first observation replaces the row's prompt."""
        messages: Sequence[Json] = task["messages"]
        if not (text := self._shown(observation)):
            return [*messages]
        system = [message for message in messages if message["role"] == "system"]
        return [*system, {"role": "user", "content": text}]

    async def _tools(self, env: Any) -> list[Json]:
        if not self._has_tools:
            return [self._act]
        listed = (await env.step({"type": "list_tools"})).observation["tools"]
        return [_tool(each["name"], each["description"], each["input_schema"]) for each in listed]

    def _actions(self, message: Any) -> list[tuple[Json, Json]]:
        """(action, reply without content) for each action in the model's answer."""
        if self._text_field:
            return [({self._text_field: message.content or ""}, {"role": "user"})]
        found = []
        for call in message.tool_calls or ():
            action = _parsed(call.function.arguments)
            if self._has_tools:
                action = {"type": "call_tool", "tool_name": call.function.name, "arguments": action}
            found.append((action, {"role": "tool", "tool_call_id": call.id}))
        return found

    def _shown(self, observation: Json) -> str:
        """Text of an observation for the model; may be empty."""
        if self._observe:
            found = observation[self._observe]
        elif "tool_name" in observation:  # the result of an MCP tool
            error, result = observation["error"], observation["result"]
            found = error["message"] if error else result
            if isinstance(found, dict):
                found = found.get("data", found)
        else:
            shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
            shown = {k: v for k, v in shown.items() if v not in (None, "", [], {})}
            texts = [value for value in shown.values() if isinstance(value, str)]
            found = texts[0] if len(shown) == len(texts) == 1 else shown or None
        if found is None:
            return ""
        return as_unicode(found) if isinstance(found, str) else json.dumps(found)


def _parsed(arguments: str) -> Json:
    """Parse the arguments of a call; the environment refuses arguments that are no JSON object."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def _tool(name: str, description: str, parameters: Json) -> Json:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def main() -> None:
    parser = parser_of(__doc__, "address of the environment's server", at_once=1)
    parser.add_argument("--reset", default="{}", help="arguments of reset but the seed, in JSON")
    parser.add_argument("--observe", help="field of observations for the model")
    parser.set_defaults(most=1000)
    options = parse(parser)
    episodes = Episodes(options.source.rstrip("/"), options.observe)
    if options.action == "rows":
        rows = asyncio.run(episodes.rows(options.most, json.loads(options.reset)))
        write_rows(options.file, rows, options.most)
    else:
        asyncio.run(serve(options.file, episodes.act, options.at_once))


if __name__ == "__main__":
    main()
