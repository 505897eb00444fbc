import io
import json
from pathlib import Path

import pytest

from megatron_grpo.reporting import tracking
from megatron_grpo.reporting.tracking import Tracking, drop_records_after, last_step


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(step: int, rewards: list[float]) -> list[dict[str, object]]:
    """Rows of completions with these rewards."""
    return [
        {
            "step": step,
            "completion": "żółw 12",
            "reward": reward,
            "rewards": {"exact": reward},
            "columns": {"answer": "12"},
        }
        for reward in rewards
    ]


def run(run_dir: Path, first_step: int, steps: list[int], value: float = 1.0) -> None:
    tracking = Tracking(run_dir, first_step)
    for step in steps:
        tracking.log(step, {"reward": value}, rows_of(step, [1.0, 0.5, 0.0]), [{"step": step}])
        # On disk when the step ends, not when the run does.
        assert last_step(run_dir) == read(run_dir / "completions.jsonl")[-1]["step"] == step
    tracking.close()


def test_a_step_is_one_metrics_line_and_lines_of_completions_and_tokens(tmp_path: Path) -> None:
    run(tmp_path, 0, [1])
    # Without a reference the loss has no KL, a skipped step no gradient norm and perhaps no loss;
    # scripts still find the keys.
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl": None, "loss": None, "grad_norm": None, "reward": 1.0}
    ]
    assert read(tmp_path / "completions.jsonl") == rows_of(1, [1.0, 0.5, 0.0])
    assert read(tmp_path / "tokens.jsonl") == [{"step": 1}]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 0, [1, 2, 3, 4], value=1.0)
    run(tmp_path, 2, [3, 4, 5], value=2.0)
    metrics = read(tmp_path / "metrics.jsonl")
    assert [(m["step"], m["reward"]) for m in metrics] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    steps = [row["step"] for row in read(tmp_path / "completions.jsonl")]
    assert steps == [step for step in (1, 2, 3, 4, 5) for _ in range(3)]
    assert [row["step"] for row in read(tmp_path / "tokens.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "damaged", ["", '{"step": 2, "rew', "\0" * 40 + "\n", '{"step"\n', "[1]\n", '{"step": null}\n']
)
def test_last_lines_damaged_by_a_kill_or_crash_are_dropped(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + damaged * 2)
    assert last_step(tmp_path) == 2
    drop_records_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("kept", ["", 'no JSON, and not read\n{"step": 1, "text": "x"}\n'])
def test_records_after_a_step_are_dropped_from_the_end(kept: str, tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text(kept + '{"step": 2}\n{"step": 2}\n{"step": 3}\n')
    drop_records_after(path, 1)
    assert path.read_text() == kept
    drop_records_after(path, 1)
    assert path.read_text() == kept


def evaluate(tracking: Tracking, step: int, value: float) -> None:
    """Record an evaluation: before the first step, or late, for a run that ended without it."""
    tracking.log_evaluated(step, [{"completion": "12", "reward": value}] * 2)
    tracking.amend(step, {"eval/pass@1": value})


class CountedReads(io.BytesIO):
    num_reads = 0

    def read(self, size: int | None = None, /) -> bytes:
        self.num_reads += 1
        return super().read(size)


def test_a_line_of_many_blocks_takes_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BLOCK_BYTES", 8)
    lines = [b"first\n", b"x" * 8000 + b"\n", b"last\n"]
    file = CountedReads(b"".join(lines))
    assert [line for _, line in tracking._lines_backwards(file)] == lines[::-1]
    assert file.num_reads < 20


def test_an_evaluation_before_the_first_step_has_a_record_of_its_own(tmp_path: Path) -> None:
    for value in (0.25, 0.5):  # the first run ends before its first checkpoint
        tracking = Tracking(tmp_path, 0)
        assert not tracking.has_metrics(0, ["eval/pass@1"])
        evaluate(tracking, 0, value)
        assert tracking.has_metrics(0, ["eval/pass@1"])
        tracking.log(1, {"reward": 1.0}, [])
        tracking.close()
    first, second = read(tmp_path / "metrics.jsonl")
    assert first == {"step": 0, "kl": None, "loss": None, "grad_norm": None, "eval/pass@1": 0.5}
    assert (second["step"], second["reward"]) == (1, 1.0)
    assert (
        read(tmp_path / "eval_completions.jsonl")
        == [{"step": 0, "completion": "12", "reward": 0.5}] * 2
    )


def test_an_evaluation_that_comes_later_joins_the_record_of_its_step(tmp_path: Path) -> None:
    run(tmp_path, 0, [1, 2])
    tracking = Tracking(tmp_path, 2)
    tracking.log_evaluated(2, [{"reward": 0.0}])  # ... and then the process was killed
    tracking.log_evaluated(4, [{"reward": 0.0}])  # after the checkpoint
    tracking.close()
    tracking = Tracking(tmp_path, 2)
    assert not tracking.has_metrics(2, ["eval/pass@1"])
    evaluate(tracking, 2, 0.5)
    tracking.log(3, {"reward": 3.0}, [])
    tracking.close()
    records = read(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["reward"], r.get("eval/pass@1")) for r in records] == [
        (1, 1.0, None),
        (2, 1.0, 0.5),
        (3, 3.0, None),
    ]
    rewards = [row["reward"] for row in read(tmp_path / "eval_completions.jsonl")]
    assert rewards == [0.5, 0.5]


def test_a_metric_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    tracking = Tracking(tmp_path, 0)
    with pytest.raises(ValueError, match=r"step 3: metrics are not finite: \{'kl': nan\}"):
        tracking.log(3, {"reward": 0.5, "kl": float("nan")}, [])
    tracking.close()
    assert read(tmp_path / "metrics.jsonl") == []
