import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.engines.json_server import json_server
from megatron_grpo.config.trackers import SwanlabConfig, TrackioConfig, WandbConfig
from megatron_grpo.reporting.trackers import SwanlabRun, TensorBoardRun, TrackioRun, WandbRun
from megatron_grpo.reporting.tracking import Tracking

ROWS = [
    {"completion": "żółw", "reward": reward, "rewards": {"exact": reward}, "columns": {"x": "12"}}
    for reward in (1.0, 0.0, 0.5)
]
"""Rows of completions."""
TABLE = [{"completion": "żółw", "reward": reward, "reward/exact": reward} for reward in (1.0, 0.0)]
"""The first two, as trackers show them."""


def needs(package: str) -> Any:
    """The package; skips the test if it is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not in the lock, which its pins exclude: make test-trackers")
    return importlib.import_module(package)


def test_tensorboard_shows_each_step_once_as_last_logged(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, steps, value in [(0, [1, 2, 3], 1.0), (2, [3, 4], 2.0)]:
        tracking = Tracking(tmp_path, first_step, [TensorBoardRun(tmp_path, first_step)])
        for step in steps:
            tracking.log(step, {"reward": value}, [])
        tracking.amend(steps[-1], {"eval/pass@1": 0.5})
        tracking.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in shown.Scalars("reward")]
    assert rewards == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [event.step for event in shown.Scalars("eval/pass@1")] == [4]


def test_wandb_runs_offline_says_so_keeps_its_id_and_gets_few_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    cfg = WandbConfig(project="adds", entity="us", group="sweep", tags=["a"], num_completions=2)
    for first_step in (0, 1):
        run = WandbRun(tmp_path, cfg, {"seed": 42})
        run.log(first_step + 1, {"reward": 0.5}, ROWS)
        run.close()
    made = run._run
    assert (made.entity, made.project, made.group, made.tags) == ("us", "adds", "sweep", ("a",))
    assert f"wandb sync {tmp_path}" in capsys.readouterr().err
    wandb_id = (tmp_path / "wandb_id").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{wandb_id}.wandb"}
    tables = list((tmp_path / "wandb").glob("**/completions*.table.json"))
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [2, 2]


ONE_STEP = """
import sys
from pathlib import Path
from megatron_grpo.config.trackers import WandbConfig
from megatron_grpo.reporting.trackers import WandbRun
run = WandbRun(Path(sys.argv[1]), WandbConfig(project="adds"), {})
print("logs", flush=True)
sys.stdin.readline()
run.log(1, {"reward": 0.5}, [])
run.close()
print(run._run.settings.mode, run._run.settings.finish_timeout)
"""


@contextmanager
def one_step(run_dir: Path, address: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that logs a step to the wandb at `address` once it reads a line."""
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
        output, error = process.communicate("\n", timeout=100)
    assert output.splitlines() == ["logs", "offline 300.0"], error
    assert "wandb cannot be reached: " in error and "connection refused" in error
    assert f"`wandb sync` uploads {tmp_path / 'wandb'} later" in error
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


BUCKET = {
    "id": "0",
    "name": "0",
    "project": {"id": "0", "name": "adds", "entity": {"id": "0", "name": "us"}},
}
"""A run as wandb's server creates it."""


def test_a_run_that_wandb_refuses_ends_at_once(tmp_path: Path) -> None:
    """With a revoked key, days of training would go unrecorded."""
    with (
        json_server(lambda _: (401, {})) as server,
        one_step(tmp_path, server.url, WANDB_INIT_TIMEOUT="20") as process,
    ):
        output, error = process.communicate("\n", timeout=100)
    assert output == "" and process.returncode == 1
    assert "error 401" in error and "cannot be reached" not in error


def test_a_run_does_not_wait_for_a_wandb_that_is_gone_at_the_end(tmp_path: Path) -> None:
    is_gone = threading.Event()
    begun = {"data": {"upsertBucket": {"bucket": BUCKET, "inserted": True}}}
    with (
        json_server(lambda _: (0, None) if is_gone.is_set() else (200, begun)) as server,
        one_step(tmp_path, server.url, WANDB_FINISH_TIMEOUT="2") as process,
    ):
        assert process.stdout.readline() == "logs\n", process.stderr.read()
        is_gone.set()
        output, error = process.communicate("\n", timeout=60)
    assert output == "online 2.0\n", error
    assert "Timed out finishing run" in error and "wandb sync" in error
    assert list((tmp_path / "wandb").glob("run-*/run-*.wandb"))


def test_trackio_continues_the_run_of_a_name_and_shows_completions_and_late_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    needs("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    cfg, run_dir = TrackioConfig(project="adds", num_completions=2), tmp_path / "first"
    for first_step, steps in [(0, [1, 2]), (2, [3, 4]), (0, [1])]:
        run = TrackioRun(run_dir, first_step, cfg, {"seed": 42})
        for step in steps:
            run.log(step, {"reward": 0.5}, ROWS)
        run.log(steps[-1], {"eval/pass@1": 0.25}, [])
        run.close()
    runs = SQLiteStorage.get_run_records("adds")
    assert [run["name"] for run in runs] == ["first", "first"]
    resumed, restarted = (SQLiteStorage.get_logs("adds", run_id=run["id"]) for run in runs)
    assert [row["step"] for row in resumed] == [1, 2, 2, 3, 4, 4]
    assert [row["step"] for row in restarted] == [1, 1]
    assert [row.get("eval/pass@1") for row in resumed] == [None, None, 0.25, None, None, 0.25]
    assert resumed[0]["reward"] == 0.5 and resumed[0]["completions"]["_value"] == TABLE
    assert SQLiteStorage.get_run_config("adds", run_id=runs[0]["id"])["seed"] == 42


def test_swanlab_runs_offline_keeps_its_id_and_leaves_ctrl_c_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("swanlab")
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    on_interrupt = signal.getsignal(signal.SIGINT)
    cfg = SwanlabConfig(project="adds", workspace="us", num_completions=2)
    for step in (1, 2):
        run = SwanlabRun(tmp_path, cfg, {"seed": 42})
        run.log(step, {"reward": 0.5}, ROWS)
        run.log(step, {"eval/pass@1": 0.25}, [])
        assert signal.getsignal(signal.SIGINT) == on_interrupt
        run.close()
    assert "SWANLAB_API_KEY is not set" in capsys.readouterr().err
    run_id = (tmp_path / "wandb_id").read_text()
    files = sorted((tmp_path / "swanlog").glob(f"run-*-{run_id}/run-{run_id}.swanlab"))
    for step, file in zip((1, 2), files, strict=True):
        start, scalars = swanlab_records(file)
        assert (start.project, start.workspace, start.id) == ("adds", "us", run_id)
        assert scalars == [("reward", step, 0.5), ("eval/pass@1", step, 0.25)]
        [table] = file.parent.glob("media/echarts/*.json")
        assert json.loads(table.read_text())["rowData"] == TABLE


def swanlab_records(file: Path) -> tuple[Any, list[tuple[str, int, float]]]:
    """The start of a run, and its numbers as (name, step, value)."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(line) for line in reader]
    reader.close()
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    return records[0].start, [(each.key, each.step, each.value.number) for each in scalars]
