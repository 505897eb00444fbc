import http.server
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import WandbConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.reporting.metrics import StepReport
from megatron_grpo.reporting.tracking import (
    Tracking,
    completion_rows,
    drop_records_after,
    last_step,
)

OFF = WandbConfig()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(step: int, rewards: list[float]) -> list[dict[str, object]]:
    """Rows of completions with these rewards, whose advantages are twice the rewards less 1."""
    prompt = Prompt(index=4, token_ids=(1, 2), text="What is 7 + 5?", row={})
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            completion_ids=(3, 4),
            logprobs=(-0.5, -0.1),
            finish_reason="stop",
            text="żółw 12",
            policy_version=6,
        )
        for i in range(len(rewards))
    ]
    totals = torch.tensor(rewards, dtype=torch.float64)
    experience = Experience(
        samples,
        [{"exact": r} for r in rewards],
        totals,
        torch.zeros(len(rewards)),
        (2 * totals - 1).nan_to_num(),
    )
    entropy = [0.5 + i if i else math.nan for i in range(len(rewards))]
    report = StepReport({}, entropy, [0.01] * len(rewards))
    return completion_rows(step, experience, range(len(rewards)), report)


def run(run_dir: Path, first_step: int, steps: list[int], value: float = 1.0) -> None:
    tracking = Tracking(run_dir, first_step, OFF, {})
    for step in steps:
        tracking.log(step, {"reward": value}, rows_of(step, [1.0, math.nan, 0.0]))
        # On disk when the step ends, not when the run does.
        assert last_step(run_dir) == read(run_dir / "completions.jsonl")[-1]["step"] == step
    tracking.close()


def test_a_step_is_one_metrics_line_and_one_line_per_completion(tmp_path: Path) -> None:
    run(tmp_path, 0, [1])
    # Without a reference the loss has no KL, a skipped step no gradient norm and perhaps no loss;
    # scripts still find the keys.
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl": None, "loss": None, "grad_norm": None, "reward": 1.0}
    ]
    first, failed, last = read(tmp_path / "completions.jsonl")
    assert first == {
        "step": 1,
        "prompt_index": 4,
        "sample_index": 0,
        "prompt": "What is 7 + 5?",
        "completion": "żółw 12",
        "num_tokens": 2,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 1.0,
        "entropy": None,  # no token of it counts
        "logprob_gap": 0.01,
        "finish_reason": "stop",
        "policy_version": 6,
    }
    # By these `view` finds a row, without decoding it.
    assert list(first)[:3] == ["step", "prompt_index", "sample_index"]
    assert (failed["sample_index"], failed["reward"]) == (1, None)
    assert failed["rewards"] == {"exact": None}
    assert (last["advantage"], last["entropy"]) == (-1.0, 2.5)


def test_tensorboard_shows_each_step_once_as_the_run_that_was_resumed_last_logged_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, steps, value in [(0, [1, 2, 3], 1.0), (2, [3, 4], 2.0)]:
        tracking = Tracking(tmp_path, first_step, OFF, {}, tensorboard=True)
        for step in steps:
            tracking.log(step, {"reward": value}, [])
        tracking.amend(steps[-1], {"eval/pass@1": 0.5})
        tracking.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in shown.Scalars("reward")]
    assert rewards == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [event.step for event in shown.Scalars("eval/pass@1")] == [4]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 0, [1, 2, 3, 4], value=1.0)
    run(tmp_path, 2, [3, 4, 5], value=2.0)
    metrics = read(tmp_path / "metrics.jsonl")
    assert [(m["step"], m["reward"]) for m in metrics] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    steps = [row["step"] for row in read(tmp_path / "completions.jsonl")]
    assert steps == [step for step in (1, 2, 3, 4, 5) for _ in range(3)]


@pytest.mark.parametrize(
    "damaged", ["", '{"step": 2, "rew', "\0" * 40 + "\n", '{"step"\n', "[1]\n", '{"step": null}\n']
)
def test_last_lines_that_a_kill_or_a_crash_of_the_host_has_damaged_are_dropped(
    tmp_path: Path, damaged: str
) -> None:
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
    """Record an evaluation, as before the first step or for one that an ended run lacks."""
    tracking.log_evaluated(step, [{"completion": "12", "reward": value}] * 2)
    tracking.amend(step, {"eval/pass@1": value})


def test_an_evaluation_before_the_first_step_has_a_record_of_its_own(tmp_path: Path) -> None:
    for value in (0.25, 0.5):  # the first run ends before its first checkpoint
        tracking = Tracking(tmp_path, 0, OFF, {})
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
    tracking = Tracking(tmp_path, 2, OFF, {})
    tracking.log_evaluated(2, [{"reward": 0.0}])  # ... and then the process was killed
    tracking.log_evaluated(4, [{"reward": 0.0}])  # after the checkpoint
    tracking.close()
    tracking = Tracking(tmp_path, 2, OFF, {})
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
    tracking = Tracking(tmp_path, 0, OFF, {})
    with pytest.raises(ValueError, match=r"step 3: metrics are not finite: \{'kl': nan\}"):
        tracking.log(3, {"reward": 0.5, "kl": float("nan")}, [])
    tracking.close()
    assert read(tmp_path / "metrics.jsonl") == []


def test_wandb_runs_offline_says_so_keeps_its_id_and_gets_so_many_completions_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    cfg = WandbConfig(project="adds", num_completions=2)
    for first_step in (0, 1):
        tracking = Tracking(tmp_path, first_step, cfg, {"seed": 42})
        tracking.log(first_step + 1, {"reward": 0.5}, rows_of(first_step + 1, [1.0, 0.0, 0.5]))
        tracking.close()
    assert f"wandb sync {tmp_path}" in capsys.readouterr().err
    wandb_id = (tmp_path / "wandb_id").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{wandb_id}.wandb"}
    assert len(read(tmp_path / "completions.jsonl")) == 6
    tables = list((tmp_path / "wandb").glob("**/completions*.table.json"))
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [2, 2]


ONE_STEP = """
import sys
from pathlib import Path
from megatron_grpo.config.config import WandbConfig
from megatron_grpo.reporting.tracking import Tracking
tracking = Tracking(Path(sys.argv[1]), 0, WandbConfig(project="adds"), {})
print("logs", flush=True)
sys.stdin.readline()
tracking.log(1, {"reward": 0.5}, [])
tracking.close()
print(tracking._wandb._run.settings.mode, tracking._wandb._run.settings.finish_timeout)
"""


@contextmanager
def one_step(run_dir: Path, address: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that logs a step to the wandb at `address`, once a line comes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    key = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address}
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_STEP, run_dir],
        env=environment | key | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_for_which_wandb_cannot_be_reached_goes_on_offline(tmp_path: Path) -> None:
    with one_step(tmp_path, "http://127.0.0.1:9", WANDB_INIT_TIMEOUT="2") as process:
        output, told = process.communicate("\n", timeout=100)
    assert output.splitlines() == ["logs", "offline 300.0"], told
    assert "wandb cannot be reached: " in told and "connection refused" in told
    assert f"`wandb sync` uploads {tmp_path / 'wandb'} later" in told
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


class Wandb(http.server.BaseHTTPRequestHandler):
    """Lets a run begin, or refuses it, and says nothing more once its server `is_gone`."""

    bucket: ClassVar[dict[str, Any]] = {
        "id": "0",
        "name": "0",
        "project": {"id": "0", "name": "adds", "entity": {"id": "0", "name": "us"}},
    }

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.is_gone:
            self.close_connection = True
            return
        answer = json.dumps({"data": {"upsertBucket": {"bucket": self.bucket, "inserted": True}}})
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def wandb_server() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wandb)
    server.is_gone, server.status = False, 200
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_run_that_wandb_refuses_ends_at_once(tmp_path: Path) -> None:
    """With a key that was revoked all its days would go unrecorded."""
    with wandb_server() as server:
        server.status = 401
        with one_step(tmp_path, server.address, WANDB_INIT_TIMEOUT="20") as process:
            output, told = process.communicate("\n", timeout=100)
    assert output == "" and process.returncode == 1
    assert "error 401" in told and "cannot be reached" not in told


def test_a_run_does_not_wait_for_a_wandb_that_is_gone_at_the_end(tmp_path: Path) -> None:
    with (
        wandb_server() as server,
        one_step(tmp_path, server.address, WANDB_FINISH_TIMEOUT="2") as process,
    ):
        assert process.stdout.readline() == "logs\n", process.stderr.read()
        server.is_gone = True
        output, told = process.communicate("\n", timeout=60)
    assert output == "online 2.0\n", told
    assert "Timed out finishing run" in told and "wandb sync" in told
    assert list((tmp_path / "wandb").glob("run-*/run-*.wandb"))
