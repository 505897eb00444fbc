"""Whole runs whose engines hold quantised weights."""

import json
from pathlib import Path

import pytest

from checkpoint_convert.hf_config import read_scheme
from demo.learning_curves import CONFIG, rewards
from demo.make_kinds import write
from helpers.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHANCE, LEARNT, SECONDS = 0.3, 0.6, 600


def gaps(run_dir: Path) -> list[float]:
    """The mean difference between trainer's and engine's log-probabilities, by step."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["rollout/logprob_gap_mean"] for record in records]


def test_a_run_learns_with_int8_engines_and_exports_what_they_hold(tied_model, tmp_path):
    write(tmp_path / "kinds.jsonl")
    job = Job(
        [
            f"model.path={tied_model}",
            "model.dtype=bfloat16",
            f"data.path={tmp_path / 'kinds.jsonl'}",
            f"train.run_dir={tmp_path / 'run'}",
            "train.num_steps=40",
            "train.export_quantization=int8",
            "rollout.quantization=int8",
            "grpo.rollout_importance_sampling_mode=token_truncate",
        ],
        1,
        tmp_path / "logs",
        config=CONFIG,
    )
    with job:
        ended = job.end(SECONDS)
    assert ended.exit_codes == [0], ended.output
    curve = rewards(tmp_path / "run")
    assert curve[0] < CHANCE
    assert sum(curve[-5:]) / 5 > LEARNT
    assert 0 < max(gaps(tmp_path / "run")) < 0.1
    assert read_scheme(tmp_path / "run" / "hf").dtype == "I8"
