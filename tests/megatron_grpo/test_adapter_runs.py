"""Whole runs that train adapters, with an engine that holds the model and gets the adapters."""

import json
from pathlib import Path

import pytest

from demo.learning_curves import CONFIG, rewards
from demo.make_kinds import write
from helpers.runs.jobs import Job

pytestmark = pytest.mark.slow
CHANCE, LEARNT, SECONDS = 0.3, 0.6, 300
ADAPTERS = ["lora.r=16", "lora.lora_alpha=32", "optimizer.lr=1e-2"]


def run(folder: Path, model: Path, name: str, *arguments: str) -> Path:
    run_dir = folder / name
    write(folder / "kinds.jsonl")
    given = [f"model.path={model}", f"data.path={folder / 'kinds.jsonl'}"]
    job = Job([*given, f"train.run_dir={run_dir}", *arguments], 1, folder / "logs", config=CONFIG)
    with job:
        ended = job.end(SECONDS)
    assert ended.exit_codes == [0], ended.output
    return run_dir


def gaps(run_dir: Path) -> list[float]:
    """The largest difference between trainer's and engine's log-probabilities, by step."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["rollout/logprob_gap_max"] for record in records]


def test_adapters_learn_and_go_on_with_either_kind_of_push(tied_model, tmp_path):
    learnt = run(tmp_path, tied_model, "run", *ADAPTERS, "train.num_steps=40")
    curve = rewards(learnt)
    assert curve[0] < CHANCE
    assert sum(curve[-5:]) / 5 > LEARNT
    assert max(gaps(learnt)) < 1e-4
    # The engine of this one starts anew, with the model alone, and gets adapters that are not zero.
    for number, sync in enumerate(("adapter", "merged"), 1):
        steps = f"train.num_steps={40 + 2 * number}"
        run(tmp_path, tied_model, "run", *ADAPTERS, steps, f"lora.sync={sync}")
    assert sum(rewards(learnt)[40:]) / 4 > LEARNT
    assert max(gaps(learnt)) < 1e-4
