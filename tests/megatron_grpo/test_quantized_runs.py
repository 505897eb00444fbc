"""Whole runs whose engines hold quantised weights."""

import json
from pathlib import Path

import pytest

from checkpoint_convert.hf_config import read_scheme
from demo.learning_curves import CONFIG, rewards
from demo.make_kinds import write
from helpers.engines.live import kernels_for
from helpers.runs.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHANCE, LEARNT, SECONDS = 0.3, 0.6, 600


def gaps(run_dir: Path) -> list[float]:
    """The mean difference between trainer's and engine's log-probabilities, by step."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["rollout/logprob_gap_mean"] for record in records]


def run(model: Path, folder: Path, *arguments: str) -> None:
    """A run with int8 engines, in `folder` / run."""
    write(folder / "kinds.jsonl")
    job = Job(
        [
            f"model.path={model}",
            "model.dtype=bfloat16",
            f"data.path={folder / 'kinds.jsonl'}",
            f"train.run_dir={folder / 'run'}",
            "rollout.quantization=int8",
            "grpo.rollout_importance_sampling_mode=token_truncate",
            *arguments,
        ],
        1,
        folder / "logs",
        config=CONFIG,
    )
    with kernels_for(model, "int8"), job:
        ended = job.end(SECONDS)
    assert ended.exit_codes == [0], ended.output


def test_a_run_learns_with_int8_engines_and_exports_what_they_hold(tied_model, tmp_path):
    """They sleep between generations."""
    run(
        tied_model,
        tmp_path,
        *("train.num_steps=40", "train.export_quantization=int8"),
        *("rollout.enable_sleep_mode=true", "train.offload=optimizer"),
    )
    curve = rewards(tmp_path / "run")
    assert curve[0] < CHANCE
    assert sum(curve[-5:]) / 5 > LEARNT
    assert 0 < max(gaps(tmp_path / "run")) < 0.1
    assert read_scheme(tmp_path / "run" / "hf").dtype == "I8"


def test_weights_of_8_bits_are_pushed_while_completions_are_in_progress(tied_model, tmp_path):
    run(
        tied_model,
        tmp_path,
        "rollout.max_staleness=2",
        "rollout.in_flight_updates=true",
        "rollout.max_completion_length=160",
        "optimizer.lr=1e-7",  # so that the difference is that of quantisation
        "train.num_steps=12",
    )
    rows = map(json.loads, (tmp_path / "run" / "completions.jsonl").read_text().splitlines())
    assert any(len(row.get("versions", ())) > 1 for row in rows)
    assert 0 < max(gaps(tmp_path / "run")) < 0.05
