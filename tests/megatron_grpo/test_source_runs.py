"""Whole runs of several sources, with a real vLLM engine."""

import json
from pathlib import Path

import pytest

from helpers.models.tiny import talkative
from helpers.runs.jobs import Ended, Job
from helpers.runs.train import read_json_lines, read_metrics

FILE = '''
class Digits:
    """Wants digits in two turns."""
    def reset(self, prompt): self.turn = 0
    def step(self, text):
        self.turn += 1
        return "go on", sum(c.isdigit() for c in text) / max(1, len(text)), self.turn == 2

async def ask_twice(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        messages = [{"role": "user", "content": "something else"}]
    return len(text) / 100
'''
NUM_STEPS = 2


@pytest.fixture(scope="module")
def model(tied_model: Path, tmp_path_factory) -> Path:
    return talkative(tmp_path_factory.mktemp("talkative") / "model", tied_model)


def arguments(model: Path, folder: Path, run_dir: Path) -> list[str]:
    (folder / "mine.py").write_text(FILE)
    for name in ("plain", "game", "agent"):
        rows = [{"prompt": f"{name} {i}", "kind": name} for i in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ", ".join(
        f"{{path: {folder / name}.jsonl, weight: {weight}}}"
        for name, weight in {"plain": 2, "game": 1, "agent": 1}.items()
    )
    return [
        f"model.path={model}",
        f"data.path=[{paths}]",
        "data.answer_column=null",
        "data.max_prompt_length=60",
        "rollout.max_completion_length=120",
        "sources.column=kind",
        "sources.by_name.plain.reward.functions=[demo/rewards.py:share_of_digits]",
        f"sources.by_name.game.environment.name={folder / 'mine.py'}:Digits",
        f"sources.by_name.agent.agent.function={folder / 'mine.py'}:ask_twice",
        "reward.functions=[]",
        "grpo.steps_per_generation=2",
        "grpo.generation_batch_size=32",  # 8 prompts
        "eval.data={path: " + f"{folder / 'game.jsonl'}" + "}",
        "eval.max_prompts=1",
        "eval.pass_threshold=0.5",
        f"train.run_dir={run_dir}",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
    ]


def finish(engine, log_dir: Path, given: list[str], num_steps: int) -> Ended:
    url = f"rollout.base_urls=[{engine.servers.base_urls[0]}]"
    whole = [*given, url, f"train.num_steps={num_steps}"]
    with Job(whole, 1, log_dir, token=engine.servers.token) as job:
        ended = job.end(200)
    assert ended.exit_codes == [0], ended.output
    assert ended.survivors == []
    return ended


@pytest.mark.long
def test_a_generation_has_completions_dialogues_and_sessions_in_the_shares_of_the_data(
    live_engine, model, tmp_path
):
    run_dir = tmp_path / "run"
    given = arguments(model, tmp_path, run_dir)
    for num_steps in (1, NUM_STEPS):  # the second goes on amid the generation
        finish(live_engine, tmp_path / "logs", given, num_steps)
    before, *records = read_metrics(run_dir)
    assert before["eval/num_turns/mean"] == 2
    assert len(records) == NUM_STEPS
    for record in records:
        shares = {name: record[f"source/{name}/share"] for name in ("plain", "game", "agent")}
        assert shares == {"plain": 0.5, "game": 0.25, "agent": 0.25}
        assert record["source/plain/num_turns/mean"] == 1
        assert record["source/game/num_turns/mean"] == 2
        assert record["agent/branches_mean"] == 2
        assert record["agent/failed_ratio"] == record["environment/failed_ratio"] == 0
        mean = pytest.approx(record["reward/share_of_digits/mean"])  # summed in another order
        assert record["source/plain/reward"] == mean
        assert record["source/agent/reward"] == record["reward/agent/mean"]
        assert record["grad_norm"] > 0
        # The engine's log-probabilities are of the very tokens that are trained on.
        assert record["rollout/logprob_gap_max"] < 1e-4
    rows = read_json_lines(run_dir / "completions.jsonl")
    assert len(rows) == 32
    labels = {"plain": "share_of_digits", "game": "environment", "agent": "agent"}
    for row in rows:
        kind = row["columns"]["kind"]
        assert [*row["rewards"]] == [labels[kind]]
        assert kind in row["prompt"]
        roles = [turn["role"] for turn in row.get("turns", ())]
        observed = {"plain": None, "game": "environment", "agent": "user"}[kind]
        assert roles == (["assistant", observed, "assistant"] if observed else [])
    prompts = [row["prompt_index"] for row in rows]
    assert all(prompts.count(index) == 4 for index in prompts)
