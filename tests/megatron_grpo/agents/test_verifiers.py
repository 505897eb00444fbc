"""An environment of the package verifiers, unchanged, is trained: see docs/agents.md."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from helpers.engines import served_model, wait_until
from helpers.models import talkative
from helpers.runs import read_metrics, start_run

PROJECT = Path(__file__).parents[3]
PYTHON = PROJECT / ".venv-verifiers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-verifiers: see docs/agents.md"),
]
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


def start_adapter(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    paths = {
        "PYTHONPATH": f"{PROJECT}:{folder}",
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",  # verifiers starts uv
    }
    adapter = [str(PYTHON), "-m", "megatron_grpo.agents.verifiers_tasks", *arguments]
    return subprocess.Popen([*adapter, "--env", json.dumps(ENVIRONMENT)], env=os.environ | paths)


def test_its_episodes_are_trained_on_token_for_token(tmp_path):
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    data, run_dir = tmp_path / "data.jsonl", tmp_path / "run"
    assert start_adapter(tmp_path, "rows", "sums_taskset", str(data)).wait(120) == 0
    assert len(data.read_text().splitlines()) == 8
    model = talkative(tmp_path / "model", served_model(tmp_path, "qwen3", tied=True))
    run = start_run(
        f"model.path={model}",
        f"data.path={data}",
        "data.answer_column=null",
        "data.max_prompt_length=60",
        "agent.listen=127.0.0.1:0",
        "rollout.max_completion_length=60",
        "reward.functions=[]",
        "train.num_steps=2",
        f"train.run_dir={run_dir}",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
        mark="verifiers",
    )
    try:
        told = run_dir / "agents.json"
        assert wait_until(lambda: told.exists() or run.poll() is not None, 300)
        adapter = start_adapter(tmp_path, "serve", "sums_taskset", str(told), "--at-once", "8")
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, output
        assert adapter.wait(60) == 0  # the run is over, and its file gone
    finally:
        run.kill()
    for record in read_metrics(run_dir):
        assert record["reward"] == 0.5
        assert record["agent/failed_ratio"] == 0
        assert record["rollout/logprob_gap_max"] < 1e-4
