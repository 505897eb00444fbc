"""Whole runs whose weights are pushed while completions are in progress."""

import json
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.make_sums import sums
from helpers.engines import Proxy, TestEngine
from helpers.jobs import Job
from helpers.runs import read_json_lines, read_metrics
from megatron_grpo.checkpoints.experience_file import OPEN, SAMPLES_FILE
from megatron_grpo.checkpoints.folders import latest_step, step_folder
from megatron_grpo.engines.choice import CUT

NUM_STEPS, MAX_STALENESS, BATCH_SIZE, NUM_GENERATIONS = 10, 3, 16, 4


@dataclass(frozen=True)
class Runs:
    folder: Path
    model: Path
    engine: TestEngine

    def start(self, name: str, *arguments: str) -> Job:
        return Job(
            [
                f"model.path={self.model}",
                f"data.path={self.folder / 'sums.jsonl'}",
                f"rollout.base_urls=[{self.engine.servers.base_urls[0]}]",
                "rollout.in_flight_updates=true",
                f"rollout.max_staleness={MAX_STALENESS}",
                "rollout.max_completion_length=200",
                f"grpo.generation_batch_size={BATCH_SIZE}",
                f"grpo.num_generations={NUM_GENERATIONS}",
                "grpo.rollout_importance_sampling_mode=token_truncate",
                f"train.num_steps={NUM_STEPS}",
                "train.save_interval=2",
                *[f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")],
                f"train.run_dir={self.folder / name}",
                *arguments,
            ],
            1,
            self.folder / f"logs_{name}",
            token=self.engine.servers.token,
        )


@pytest.fixture(scope="module")
def in_flight_runs(tmp_path_factory, tied_model, vllm_engine) -> Runs:
    folder = tmp_path_factory.mktemp("in_flight")
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()))
    return Runs(folder, tied_model, vllm_engine)


def spans_of(row: dict) -> list[tuple[int, int]]:
    return row.get("versions") or [(row["policy_version"], row["num_tokens"])]


def check(run_dir: Path) -> None:
    """No token is too old, and every step has trained on a generation of its own, once."""
    rows = read_json_lines(run_dir / "completions.jsonl")
    each = Counter((row["step"], row["prompt_index"], row["sample_index"]) for row in rows)
    assert set(each.values()) == {1} and len(each) == NUM_STEPS * BATCH_SIZE
    for row in rows:
        versions = [version for version, _ in spans_of(row)]
        assert versions == sorted(set(versions))
        assert 0 <= row["step"] - 1 - versions[0] <= MAX_STALENESS
        assert sum(count for _, count in spans_of(row)) == row["num_tokens"]


def test_no_token_is_older_than_allowed_and_pushes_do_not_wait(in_flight_runs: Runs) -> None:
    with in_flight_runs.start("whole") as job:
        ended = job.end(120)
    assert ended.exit_codes == [0], ended.output
    run_dir = in_flight_runs.folder / "whole"
    check(run_dir)
    records = read_metrics(run_dir)
    assert max(record["rollout/version_lag_max"] for record in records) == MAX_STALENESS
    assert any(record["rollout/mixed_versions_frac"] > 0 for record in records)


def wait_for_steps(job: Job, run_dir: Path, count: int) -> None:
    """Wait until the run has logged `count` steps."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert job.is_running and time.monotonic() < deadline, job.output
        time.sleep(0.01)


def test_a_run_that_is_killed_again_and_again_trains_on_every_generation_once(
    in_flight_runs: Runs,
) -> None:
    run_dir = in_flight_runs.folder / "killed"
    for num_steps in (3, 6):
        with in_flight_runs.start("killed") as job:
            wait_for_steps(job, run_dir, num_steps)
            job.signal(signal.SIGKILL)
            assert job.end(15).exit_codes == [-signal.SIGKILL]
    with in_flight_runs.start("killed") as job:
        assert job.end(120).exit_codes == [0]
    check(run_dir)


def test_with_over_sampling_every_prompt_is_trained_on_once_through_a_kill(
    in_flight_runs: Runs,
) -> None:
    run_dir, option = in_flight_runs.folder / "over", "rollout.over_sampling=2.5"
    checkpoints = run_dir / "checkpoints"
    with in_flight_runs.start("over", option) as job:
        wait_for_steps(job, run_dir, 5)
        job.signal(signal.SIGKILL)
        assert job.end(15).exit_codes == [-signal.SIGKILL]
    newest = step_folder(checkpoints, latest_step(checkpoints))
    saved = read_json_lines(newest / f"{OPEN}{SAMPLES_FILE}")
    with in_flight_runs.start("over", option) as job:
        ended = job.end(120)
    assert ended.exit_codes == [0], ended.output
    check(run_dir)
    rows = read_json_lines(run_dir / "completions.jsonl")
    groups = Counter(row["prompt_index"] for row in rows)
    assert set(groups.values()) == {NUM_GENERATIONS}
    dropped = [record["rollout/dropped_stale"] for record in read_metrics(run_dir)]
    assert len(dropped) == NUM_STEPS
    made = {(row["prompt_index"], row["sample_index"]): row["completion"] for row in rows}
    whole = [row for row in saved if row["finish_reason"] != CUT]
    assert whole
    lost = [row for row in whole if made[row["prompt"], row["sample_index"]] != row["text"]]
    assert len(lost) <= NUM_GENERATIONS * sum(dropped)


def test_a_preempted_run_saves_what_is_ready_and_gives_up_the_rest(in_flight_runs: Runs) -> None:
    run_dir = in_flight_runs.folder / "preempted"
    with in_flight_runs.start("preempted", "train.save_interval=100") as job:
        wait_for_steps(job, run_dir, 3)
        job.signal(signal.SIGTERM)
        ended = job.end(30)
    assert ended.exit_codes == [75], ended.output
    saved = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))
    assert saved >= 3
    with in_flight_runs.start("preempted") as job:
        assert job.end(120).exit_codes == [0]
    check(run_dir)


@pytest.mark.slow
def test_engines_that_the_run_has_started_end_with_it(in_flight_runs: Runs) -> None:
    own = "rollout.base_urls=[]", "rollout.num_engines=1", "train.num_steps=4"
    with in_flight_runs.start("own", *own) as job:
        ended = job.end(200)
    assert ended.exit_codes == [0] and ended.survivors == [], ended.output
    assert "is lost" not in ended.output


@pytest.mark.slow
def test_completions_go_on_when_the_only_engine_is_lost_and_comes_back(
    in_flight_runs: Runs,
) -> None:
    proxy = Proxy(in_flight_runs.engine.servers.base_urls[0])
    run_dir = in_flight_runs.folder / "lost"
    with in_flight_runs.start("lost", f"rollout.base_urls=[{proxy.url}]") as job:
        wait_for_steps(job, run_dir, 3)
        proxy.cut()
        time.sleep(1)
        proxy.mend()
        ended = job.end(120)
    proxy.cut()
    assert ended.exit_codes == [0], ended.output
    assert "is lost" in ended.outputs[0] and "is back" in ended.outputs[0]
    check(run_dir)
