"""An environment of the package verifiers, unchanged, is trained: see docs/agents.md."""

import json
import os
from types import SimpleNamespace

import pytest

from helpers.runs.library_agents import PROJECT, Adapter, assert_token_for_token
from megatron_grpo.integrations.verifiers import ending

PYTHON = PROJECT / ".venv-verifiers" / "bin" / "python"
TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        return 0.5

class SumConfig(vf.TasksetConfig): pass

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        data = [SumData(prompt=f"{i}+1", answer=str(i + 1)) for i in range(8)]
        return [SumTask(each, self.config.task) for each in data]

__all__ = ["SumTaskset"]
"""
ENVIRONMENT = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


def test_an_episode_without_a_trainable_trace_has_failed():
    fixed = SimpleNamespace(agent=SimpleNamespace(trainable=False))
    episode = SimpleNamespace(ok=True, traces=[fixed])
    assert "no trace of a trainable agent" in ending(episode)["error"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-verifiers: see docs/agents.md")
def test_episodes_of_verifiers_are_trained_on_token_for_token(tmp_path):
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    adapter = Adapter(
        PYTHON,
        "verifiers",
        "sums_taskset",
        "--env",
        json.dumps(ENVIRONMENT),
        PYTHONPATH=f"{PROJECT}:{tmp_path}",
        PATH=f"{PYTHON.parent}:{os.environ['PATH']}",  # verifiers starts uv
    )
    records = adapter.train(tmp_path, 8, "data.max_prompt_length=60", at_once=8)
    assert_token_for_token(records)
    assert [record["reward"] for record in records] == [0.5, 0.5]
