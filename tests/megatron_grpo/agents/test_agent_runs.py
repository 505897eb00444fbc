"""Whole runs with completions by agents, on a real vLLM engine."""

import sys
from pathlib import Path

import pytest

from helpers.models.tiny import talkative
from helpers.runs.jobs import Job
from helpers.runs.train import read_json_lines, read_metrics

pytestmark = pytest.mark.engines

PROGRAM = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": row["prompt"]}]
answer = ask(messages)
ask([*messages, answer, {"role": "user", "content": "again"}])
other = ask([{"role": "user", "content": "something else"}])
text = answer["content"] + other["content"]
print("working")
print(json.dumps({"reward": sum(c.isdigit() for c in text) / (1 + len(text))}))
"""


@pytest.fixture(scope="module")
def model(tied_model: Path, tmp_path_factory) -> Path:
    return talkative(tmp_path_factory.mktemp("talkative") / "model", tied_model)


@pytest.mark.long
def test_a_run_with_a_program_trains_on_its_branches_and_evaluates_it(live_engine, model, tmp_path):
    data, program = tmp_path / "data.jsonl", tmp_path / "agent.py"
    data.write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    program.write_text(PROGRAM)
    arguments = [
        f"model.path={model}",
        f"data.path={data}",
        "data.max_prompt_length=60",
        f"agent.command={sys.executable} {program}",
        "rollout.max_completion_length=200",
        "reward.functions=[]",
        "grpo.steps_per_generation=2",
        "train.num_steps=2",
        "grpo.beta=0.1",
        f"train.run_dir={tmp_path / 'run'}",
        *("eval.data={}", "eval.max_prompts=2", "eval.num_generations=2"),
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
        "parallel.data_parallel_size=2",
        f"rollout.base_urls=[{live_engine.servers.base_urls[0]}]",
    ]
    with Job(arguments, 2, tmp_path / "logs", token=live_engine.servers.token) as job:
        ended = job.end(150)
    assert ended.exit_codes == [0, 0], ended.output
    assert ended.survivors == []
    before, *records = read_metrics(tmp_path / "run")
    assert len(records) == 2
    for record in (before, records[-1]):
        assert record["eval/num_turns/mean"] == 3
        assert record["eval/agent/failed_ratio"] == 0
    rows = read_json_lines(tmp_path / "run" / "completions.jsonl")
    assert rows
    for record in records:
        assert record["grad_norm"] > 0
        assert (record["num_turns/mean"], record["agent/branches_mean"]) == (3, 2)
        # The engine's log-probabilities belong to the tokens that are trained on.
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["reward"] == record["reward/agent/mean"]
