"""Agents: their endpoint, the processes in which they act, and their groups."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.agents import actors
from megatron_grpo.agents.chat import BadRequest, ChatTemplate
from megatron_grpo.agents.endpoint import LOOPBACK, Endpoint
from megatron_grpo.agents.fork_pool import ForkPool, InstanceFailed
from megatron_grpo.agents.session import Session, SessionOver
from megatron_grpo.agents.task_queue import TaskQueue
from megatron_grpo.config.agent import AgentConfig
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import EnvironmentConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.arguments import engine_table
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.group import PartnerGroup
from megatron_grpo.engines.http import EngineDown, EngineError
from megatron_grpo.engines.request import SamplingParams
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.proxies import proxy_hint
from parallel.clock import running_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
ACTORS = ("command", "function", "tools", "mcp_servers", "max_tool_characters", "python_arguments")
"""Keys of `agent` that define the actor."""
TRIAL_SECONDS = 60.0
"""Limit of `try_agent` for the first request; only agents with tools fail when they exceed it."""
POLL_SECONDS = 0.05
DERENDER = "/v1/chat/completions/derender"
"""The engines' route that parses the tokens of a turn into an assistant's message."""


def actor_pool(cfg: Config) -> ForkPool:
    """Pool of agent processes: an environment pool with `actors.Actor` as its class."""
    agent = cfg.agent
    return ForkPool(
        EnvironmentConfig(
            name=f"{Path(actors.__file__)}:Actor",
            arguments=agent.model_dump(include=set(ACTORS), mode="json"),
            timeout=agent.timeout,
            memory_megabytes=agent.memory_megabytes,
        ),
        section="agent",
        what=_described(agent),
    )


def try_agent(pool: ForkPool, agent: AgentConfig, prompt: Prompt) -> None:
    """Start the agent on a row and stop it at its first request, which is not answered. Raises
    ValueError if the agent fails or ends before, or has tools and is late."""
    who = _described(agent)
    with socket.create_server((LOOPBACK, 0)) as endpoint, ExitStack() as stack:
        url = f"http://{LOOPBACK}:{endpoint.getsockname()[1]}"
        instance = pool.new_instance()
        stack.callback(instance.end)
        columns = _columns(prompt, url, "trial", _data_urls(prompt))
        acting = instance.begin(prompt.text, columns, seed=0)
        if _sends_request(endpoint, acting):
            return
    if not acting.done():  # late: a user's program may have much to prepare
        if agent.has_tools:
            raise ValueError(f"{who}: not ready after {TRIAL_SECONDS:g} s: correct or leave it out")
        return
    why = acting.exception() or "it ended without asking for a turn"
    raise ValueError(f"{who} cannot act on row {prompt.index}: {why}")


def _sends_request(endpoint: socket.socket, acting: "Future[Any]") -> bool:
    """Whether a request arrives before the agent ends and before `TRIAL_SECONDS` are over."""
    endpoint.settimeout(POLL_SECONDS)
    deadline, has_ended = running_time() + TRIAL_SECONDS, False
    while not has_ended and running_time() < deadline:
        # Read before `accept`: an agent that asks and then ends has its request accepted below.
        has_ended = acting.done()
        with suppress(TimeoutError):
            endpoint.accept()[0].close()
            return True
    return False


class Agents:
    """Starts an agent for each sample and serves its requests, until `close`."""

    def __init__(
        self,
        cfg: Config,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: Sequence[int],
        client: RolloutClient,
    ) -> None:
        self._cfg, self._client, self._tokenizer = cfg, client, tokenizer
        self._end_tokens = end_tokens
        # `rollout.stop_token_ids` stay: parsers look for the token that ends a tool call.
        self._unparsed = {*end_tokens} - {*cfg.rollout.stop_token_ids}
        tasks = None
        if cfg.agent.listen is not None:  # agents run elsewhere and fetch tasks by HTTP
            tasks = TaskQueue(cfg.train.run_dir, cfg.agent.timeout)
        self._pool = tasks or actor_pool(cfg)
        self._endpoint = Endpoint(self._parse, cfg.model.path.name, tasks)
        client.loop.call(self._endpoint.start(*cfg.agent.address))

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._pool.wait_ready(())  # without rows: an agent requires no column

    def groups(self, cfg: Config) -> "Callable[..., AgentGroup]":
        template = ChatTemplate.of(self._tokenizer, cfg, self._end_tokens)
        longest = cfg.data.max_prompt_length
        assert longest is not None
        return partial(AgentGroup, agents=self, template=template, max_prompt_length=longest)

    async def run(self, group: "AgentGroup", sample_index: int, router: RequestRouter) -> Sample:
        """Open a session and have a new agent act in it; returns the sample. Raises InstancesLost
        if no agent can be started any more."""
        agent_cfg = self._cfg.agent
        prompt, url, images = group.prompt, self._endpoint.url, group.images
        session = Session(
            group, sample_index, router, group.template, agent_cfg, group.max_prompt_length, images
        )
        key, agent = self._endpoint.admit(session), self._pool.new_instance()
        try:
            seed = group.params.turn_seed(sample_index, turn=-1)
            acting = agent.begin(prompt.text, _columns(prompt, url, key, images), seed)
            ending = await asyncio.wrap_future(acting)
            session.end(ending["reward"], ending["metrics"])
        except InstanceFailed as failure:
            # Only agents of `listen` can meet a proxy: the run sets NO_PROXY for its processes.
            may_be_proxy = agent_cfg.listen is not None and not session.turns
            hint = proxy_hint(url) if may_be_proxy else ""
            session.end(None, failure=f"{failure}{hint}")
        finally:
            # No effect after an `end` above; here for a run that was cancelled.
            session.end(None, failure="it was given up")
            del self._endpoint.sessions[key]
            agent.end()
        return session.to_sample()

    def close(self) -> None:
        self._pool.close()
        self._client.loop.call(self._endpoint.close())

    async def _parse(self, choice: Choice, request: Mapping[str, Any], url: str) -> Json:
        """Parse a turn into a message, by the tool and reasoning parsers of the engine at `url`.
        Without parsers the message is the text."""
        rollout = self._cfg.rollout
        if not (rollout.tool_call_parser or engine_table(rollout).get("reasoning_parser")):
            return {"role": "assistant", "content": choice.text}
        ids = choice.token_ids
        if ids and ids[-1] in self._unparsed:  # parsers would put the end token into the content
            ids = ids[:-1]
        if not ids:  # engines refuse an empty turn
            return {"role": "assistant", "content": ""}
        turn = {"index": 0, "token_ids": ids, "finish_reason": choice.finish_reason}
        names = ("messages", "tools", "tool_choice", "parallel_tool_calls")
        body = {
            "generate_response": {"request_id": "turn", "choices": [turn]},
            "chat_request": {name: request[name] for name in names if request.get(name)},
        }
        [found] = as_unicode((await self._post(DERENDER, body, url))["choices"])
        message = {"role": "assistant", "content": found["message"].get("content") or ""}
        for name in ("reasoning", "tool_calls"):
            if found["message"].get(name):
                message[name] = found["message"][name]
        return message

    async def _post(self, route: str, body: Json, url: str) -> Json:
        """Post to the engine at `url`, or to another if it is lost. Raises BadRequest if the engine
        refuses the agent's fields (a tool without a name)."""
        for address in (url, *(each for each in self._client.pool.serving if each != url)):
            try:
                return await self._client.engine(address).post(route, body)
            except (EngineDown, TimeoutError) as error:
                lost = error
            except EngineError as error:
                raise BadRequest(f"the turn cannot be parsed: {error}") from None
        raise SessionOver(f"the turn could not be parsed: {lost}")


class AgentGroup(PartnerGroup):
    """Agents that act on one prompt."""

    partner = "agent"

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        features: Json | None = None,
        *,
        agents: Agents,
        template: ChatTemplate,
        max_prompt_length: int,
    ) -> None:
        super().__init__(prompt, params, priority, features)
        self._agents, self.template = agents, template
        self.max_prompt_length = max_prompt_length
        self.images: list[str] = []
        """`data_url`s of the row's images, while sessions are played."""

    async def sample(self, router: RequestRouter) -> list[Sample]:
        if self.prompt.images:
            self.images = await asyncio.to_thread(_data_urls, self.prompt)
        samples = await super().sample(router)
        self.images = []
        return samples

    async def _play(self, index: int, router: RequestRouter) -> Sample:
        return await self._agents.run(self, index, router)


def _described(agent: AgentConfig) -> str:
    """The agent by its config keys, such as `agent.command ./agent.sh`."""
    for key in ("function", "command"):
        if named := getattr(agent, key):
            return f"agent.{key} {named}"
    named = {"tools": agent.tools, "mcp_servers": agent.mcp_servers}
    return " and ".join(f"agent.{key} {', '.join(names)}" for key, names in named.items() if names)


def _data_urls(prompt: Prompt) -> list[str]:
    return [image.data_url for image in prompt.images.images] if prompt.images else []


def _columns(prompt: Prompt, url: str, key: str, images: Sequence[str]) -> Json:
    """Arguments of `Actor.run_episode`; the row has its `images` as data URLs."""
    chat, row = prompt.messages, dict(prompt.row)
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    if images:
        assert prompt.data and prompt.data.image_column
        row[prompt.data.image_column] = images
        urls = iter(images)
        messages = [{**each, "content": _with_urls(each["content"], urls)} for each in messages]
    return as_unicode({"url": url, "key": key, "row": row, "messages": messages})


def _with_urls(content: str | list[Json], urls: Iterator[str]) -> str | list[Json]:
    """A content for chat templates in OpenAI's form."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
        for part in content
    ]
