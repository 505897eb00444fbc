"""Agents in files as users would write them, and their recorded requests."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import AutoTokenizer

from helpers.engines.live import random_prompts, sampling_params, wait_until
from helpers.engines.sampling import Completions, generate
from helpers.models.tiny import EOS_ID
from helpers.runs.environments import LONG_SLEEP
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents.agents import Agents
from megatron_grpo.agents.session import Session
from megatron_grpo.config.file import load_config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.request import SamplingParams

END_IDS = (EOS_ID, *range(20, 60))  # of 250: a turn is some six tokens long
MCP_SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number

@server.tool()
def fail() -> str:
    """Fails."""
    raise RuntimeError("out of order")

server.run()
'''
FUNCTIONS = '''
import asyncio, json, os, subprocess, sys

async def ask(client, messages, **more):
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    return answer.choices[0].message.model_dump(exclude_none=True)

async def append(client, row):
    """Only appends."""
    messages = [{"role": "user", "content": "one"}]
    for word in ("two", "three", "four"):
        messages += [await ask(client, messages), {"role": "user", "content": word}]
    return 0.5

async def long(client, row):
    """Appends, in turns of 60 tokens."""
    messages = [{"role": "user", "content": "one"}]
    for word in ("two", "three", "four", "five"):
        messages += [await ask(client, messages, max_tokens=60), {"role": "user", "content": word}]
    return 0.5

async def fork(client, row):
    """Asks twice at once, goes on from both, then from the first turn with other words."""
    first = [{"role": "user", "content": "one"}]
    left, right = await asyncio.gather(ask(client, first), ask(client, first))
    for answer in (left, right):
        await ask(client, [*first, answer, {"role": "user", "content": "two"}])
    await ask(client, [*first, left, {"role": "user", "content": "three"}])
    return {"reward": 1}

async def rewrite(client, row):
    """Compacts its history, and forgets all of it."""
    messages = [{"role": "user", "content": "one"}]
    messages += [await ask(client, messages), {"role": "user", "content": "two"}]
    await ask(client, messages)
    await ask(client, [{"role": "user", "content": "what was before"}])
    await ask(client, [{"role": "system", "content": "other"}, *messages[:1]])
    return 0.25

async def complete(client, row):
    """Continues texts."""
    text = "ab"
    for _ in range(3):
        answer = await client.completions.create(model="policy", prompt=text, max_tokens=4)
        text += answer.choices[0].text + "c"
    return 1.0

async def silent(client, row): return 1.0
async def wrong(client, row): return "much"
async def nothing(client, row): await ask(client, [{"role": "user", "content": "one"}])
async def hang(client, row):
    await ask(client, [{"role": "user", "content": "one"}])
    subprocess.Popen(["sleep", "SECONDS"], start_new_session=True)
    await asyncio.sleep(1000)
async def wait(client, row): await asyncio.sleep(1000)
async def greedy(client, row):
    while True: await ask(client, [{"role": "user", "content": "one"}])
'''


class Recorded(Completions):
    """Sessions of agents, with every request to an engine and its answer recorded."""

    def __init__(self, agents: Agents, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        super().__init__(prompts, params, new_group=agents.groups(agents._cfg))
        self.agents = agents
        self.sessions: list[Session] = []
        """In the order of their start."""
        self.keys: dict[Session, str] = {}
        self._record: dict[Session, list[tuple[list[int], list[int], list[float]]]] = {}
        admit, ask = agents._endpoint.admit, Session._ask

        def note(session: Session) -> str:
            key = self.keys[session] = admit(session)
            self.sessions.append(session)
            self._record[session] = []
            return key

        async def noted(session: Session, body: Json, stop: Sequence[str]) -> tuple[Choice, str]:
            choice, url = await ask(session, body, stop)
            answer = body["token_ids"], choice.token_ids, choice.token_logprobs
            self._record.setdefault(session, []).append(answer)
            return choice, url

        agents._endpoint.admit = note
        self._patch = patch.object(Session, "_ask", noted)

    @property
    def record(self) -> list[list[tuple[list[int], list[int], list[float]]]]:
        """(prompt, completion, log-probabilities) of each request, by session in sample order."""
        order = sorted(self.sessions, key=lambda each: (each.prompt.index, each.sample_index))
        return [self._record[session] for session in order]

    @property
    def failures(self) -> list[str]:
        return [line for group in self.groups for line in group.failures]

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._patch:
            yield


@contextmanager
def running_agents(engine, model: Path, folder: Path, **agent: Any) -> Iterator[Agents]:
    """Agents of an engine; `agent`: fields of that section, and the tool-call `parser`."""
    parser = agent.pop("parser", "null")
    if function := agent.pop("function", None):
        (folder / "agent.py").write_text(FUNCTIONS.replace("SECONDS", LONG_SLEEP), encoding="utf-8")
        agent["function"] = f"{folder / 'agent.py'}:{function}"
    settings = [f"agent.{name}={value}" for name, value in agent.items()]
    cfg = load_config(
        TINY_CONFIG,
        [*settings, f"rollout.tool_call_parser={parser}", "data.max_prompt_length=100", *STOPS],
    )
    client = engine.client()
    agents = Agents(cfg, AutoTokenizer.from_pretrained(model), END_IDS, client)
    try:
        agents.wait_ready([])
        yield agents
    finally:
        agents.close()


STOPS = [f"rollout.stop_token_ids={[*END_IDS[1:]]}"]


def generation_of(agents: Agents, engine, num_prompts: int = 2, **params: Any) -> Recorded:
    """A generation of two samples for each of `num_prompts` random prompts."""
    defaults = {"num_generations": 2, "max_completion_length": 250, "stop_token_ids": END_IDS}
    chosen = sampling_params(policy_version=engine.version, **defaults | params)
    return Recorded(agents, random_prompts(num_prompts), chosen)


def act(agents: Agents, engine, num_prompts: int = 2, **params: Any) -> tuple[list[Sample], Any]:
    """Samples of the agents, and their generation."""
    made = generation_of(agents, engine, num_prompts, **params)
    with made.recording():
        return generate(agents._client, made), made


@contextmanager
def acting(agents: Agents, made: Recorded) -> Iterator["Future[list[Sample]]"]:
    """Let agents act in another thread until the end of the block; yields their future samples."""
    with ThreadPoolExecutor(1) as thread, made.recording():
        samples = thread.submit(generate, agents._client, made)
        try:
            yield samples
        finally:

            async def give_up() -> None:
                for task in made.sampling:
                    task.cancel()

            agents._client.loop.call(give_up())
            agents._client.cancel()


@contextmanager
def waiting_agents(engine, model: Path, folder: Path, **params: Any) -> Iterator[Any]:
    """Sessions of idle agents, for tests that send the requests themselves: yields the URL, the key
    of the first session, and the generation."""
    with running_agents(engine, model, folder, function="wait") as agents:
        made = generation_of(agents, engine, 1, num_generations=1, **params)
        with acting(agents, made):
            assert wait_until(lambda: made.sessions, 60)
            yield agents._endpoint.url, made.keys[made.sessions[0]], made


def as_plain(sample: Sample) -> list[Sample]:
    """The trained sequences of a sample, each as a sample with its own prompt."""
    whole = [*sample.prompt.token_ids, *sample.completion_ids]
    return [
        replace(
            sample,
            prompt=replace(
                sample.prompt,
                token_ids=[t for start, end in branch.context for t in whole[start:end]],
            ),
            completion_ids=sample.completion_ids[branch.start : branch.end],
            logprobs=sample.logprobs[branch.start : branch.end],
            loss_mask=sample.loss_mask[branch.start : branch.end],
            branches=(),
        )
        for branch in sample.sequences
    ]
