"""Agents for tests, in files such as users would write, and what they ask engines for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import AutoTokenizer

from helpers.engines import random_prompts, sampling_params
from helpers.environments import LONG_SLEEP
from helpers.models import EOS_ID
from helpers.runs import TINY_CONFIG
from megatron_grpo.agents.agents import Agents
from megatron_grpo.agents.generation import AgentGeneration
from megatron_grpo.config.file import load_config
from megatron_grpo.data.samples import Sample

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


class Recorded(AgentGeneration):
    """Remembers what engines were asked, and what they answered."""

    def __init__(self, *args: Any) -> None:
        self.record: dict[int, list[tuple[list[int], list[int], list[float]]]] = {}
        super().__init__(*args)

    def add_answer(self, number, choice, url):
        """Take an answer, and keep it with its request."""
        asked, place = self.open.get(number), self._place(number)[0]
        if asked:
            told = self.record.setdefault(self.dialogues.index(place), [])
            told.append((asked["token_ids"], choice.token_ids, choice.token_logprobs))
        super().add_answer(number, choice, url)


@contextmanager
def running_agents(engine, model: Path, folder: Path, **agent: Any) -> Iterator[Agents]:
    """Agents of an engine with this `parser`; `function` is one of `FUNCTIONS`."""
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
    agents = Agents(cfg, AutoTokenizer.from_pretrained(model), END_IDS, client, None)
    try:
        agents.wait_ready([])
        yield agents
    finally:
        agents.close()


STOPS = [f"rollout.stop_token_ids={[*END_IDS[1:]]}"]


def generation_of(agents: Agents, engine, num_prompts: int = 2, **params: Any) -> Recorded:
    """Agents act on some prompts, twice on each."""
    defaults = {"num_generations": 2, "max_completion_length": 250, "stop_token_ids": END_IDS}
    chosen = sampling_params(policy_version=engine.version, **defaults | params)
    with patch("megatron_grpo.agents.agents.AgentGeneration", Recorded):
        return agents.generation(random_prompts(num_prompts), chosen, agents._cfg)


def act(agents: Agents, engine, num_prompts: int = 2, **params: Any) -> tuple[list[Sample], Any]:
    """The samples of agents, and the generation that they come from."""
    made, told = generation_of(agents, engine, num_prompts, **params), []
    made.on_group_complete(told.append)
    samples = agents.generate(made)
    firsts = [samples.index(group[0]) for group in told]
    assert len({*firsts}) == len(told)  # those that ended last may be missing
    for first, group in zip(firsts, told, strict=True):
        assert group == samples[first : first + len(group)]
    return samples, made


@contextmanager
def waiting_agents(engine, model: Path, folder: Path, **params: Any) -> Iterator[Any]:
    """Sessions of agents that do nothing, for tests that ask instead of them: the address, the key
    of the first, and the generation."""
    with running_agents(engine, model, folder, function="wait") as agents:
        made = generation_of(agents, engine, 1, num_generations=1, **params)
        with ThreadPoolExecutor(1) as thread:
            samples = thread.submit(agents.generate, made)
            try:
                yield agents._endpoint.url, agents._keys[made.dialogues[0]], made
            finally:
                made.abandon()
            samples.result(30)


def as_plain(sample: Sample) -> list[Sample]:
    """The sequences that a sample is trained on, as samples with a prompt each."""
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
