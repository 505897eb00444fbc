"""Agents outside of the run, which take its tasks over HTTP."""

import asyncio
import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from helpers.engines.proxies import DEAD, set_proxies
from helpers.runs.agents import acting, generation_of, running_agents
from megatron_grpo.agents.fork_pool import InstancesLost
from megatron_grpo.integrations.task_worker import serve

SECONDS = 60


@pytest.fixture
def engine(live_engine, tied_model):
    live_engine.push(tied_model)
    return live_engine


class Agent:
    """Takes tasks and ends them, as a harness on another host would."""

    def __init__(self, folder):
        file = json.loads((folder / "agents.json").read_text())
        self.url = file["url"]
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {file['token']}"}, timeout=SECONDS, base_url=self.url
        )

    def take(self):
        return self._http.post("/tasks").json()

    def ask(self, task):
        body = {"messages": task["messages"]}
        response = self._http.post(f"{task['url']}/{task['key']}/v1/chat/completions", json=body)
        return response.json()["choices"][0]["message"]["content"]

    def end(self, task, **result):
        return self.post(task, json.dumps(result))

    def post(self, task, content):
        return self._http.post(f"/tasks/{task['key']}", content=content)


@contextmanager
def outside(engine, model, folder, num_prompts, **settings):
    """An agent, and the future of its samples."""
    settings = {"listen": "127.0.0.1:0", **settings}
    with running_agents(engine, model, folder, **settings) as agents:
        made = generation_of(agents, engine, num_prompts, num_generations=1)
        agent = Agent(agents._cfg.train.run_dir)  # before tasks wait for it
        with acting(agents, made) as samples:
            yield agent, samples


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, in which the config's run directory lies."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_agent_outside_takes_tasks_and_gives_rewards(engine, tied_model, folder):
    with outside(engine, tied_model, folder, 4) as (agent, samples):
        first, second, third, last = tasks = [agent.take() for _ in range(4)]
        assert len({task["key"] for task in tasks}) == 4
        texts = [agent.ask(task) for task in tasks]
        assert agent.end(first, reward=0.5, metrics={"files": 3}).status_code == 200
        assert agent.end(second, error="it broke").status_code == 200
        huge = agent.end(third, reward=10**400).text
        assert "is not a finite number" in huge
        assert agent.end(third, reward=1).status_code == 404  # it has ended
        assert "the request cannot be read" in agent.post(last, b'{"error": "\xe9"}').text
        assert agent.post(last, rb'{"reward": 1, "metrics": {"\ud83d": 2}}').status_code == 200
        found = samples.result(SECONDS)
    assert [sample.text for sample in found] == texts
    assert [sample.dialogue_reward for sample in found][::3] == [0.5, 1]
    assert (found[0].metrics["files"], found[3].metrics["?"]) == (3, 2)
    assert [sample.finish_reason for sample in found][1:3] == ["failed"] * 2


def test_a_late_agent_is_masked_and_none_at_all_ends_the_run(engine, tied_model, folder):
    with outside(engine, tied_model, folder, 1, timeout=1) as (agent, samples):
        task = agent.take()
        assert [sample.finish_reason for sample in samples.result(SECONDS)] == ["failed"]
        assert "it was late" in agent.end(task, reward=1).text
    with outside(engine, tied_model, folder, 2, timeout=2) as (agent, samples):
        agent.take()  # its result is late; another task waits
        time.sleep(3)
        second = agent.take()
        agent.ask(second)
        assert agent.end(second, reward=1).status_code == 200
        assert [each.finish_reason == "failed" for each in samples.result(SECONDS)] == [True, False]
    began = time.monotonic()
    text = "no agent has asked for a task for 1 s"
    with (
        outside(engine, tied_model, folder, 1, timeout=1) as (_, samples),
        pytest.raises(InstancesLost, match=text),
    ):
        samples.result(SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_an_invalid_reward_costs_an_adapter_one_task(engine, tied_model, folder, monkeypatch):
    rewards = iter([float("nan"), {"not", "in JSON"}, 0.5])
    with (
        ThreadPoolExecutor(1) as thread,
        outside(engine, tied_model, folder, 3, timeout=10) as (agent, samples),
    ):

        async def act(task):
            agent.ask(task)
            return {"reward": next(rewards)}

        [file] = folder.rglob("agents.json")
        set_proxies(monkeypatch, http_proxy=DEAD)
        thread.submit(asyncio.run, serve(file, act, 1))
        found = samples.result(SECONDS)
    assert [sample.finish_reason == "failed" for sample in found] == [True, True, False]
    assert "127.0.0.1" in os.environ["no_proxy"].split(",")  # for libraries' HTTP clients


def test_tasks_need_the_token_of_a_private_file(engine, tied_model, folder):
    with outside(engine, tied_model, folder, 1) as (agent, _):
        [file] = folder.rglob("agents.json")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xe9"}):
            assert httpx.post(f"{agent.url}/tasks", headers=headers).status_code == 401
            assert httpx.post(f"{agent.url}/tasks/key", headers=headers).status_code == 401
    assert not file.exists()


def test_a_taken_address_is_named(engine, tied_model, folder):
    with outside(engine, tied_model, folder, 1) as (agent, _):
        address = agent.url.removeprefix("http://")
        with (
            pytest.raises(ValueError, match=f"agent.listen {address}: .*in use"),
            running_agents(engine, tied_model, folder, listen=address),
        ):
            pass
