"""Whole runs that are rewarded by a model, with a real vLLM of it beside the engine's."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.models.reward_models import STEP_TAG, process_model_folder, reward_model_folder
from helpers.runs.jobs import Job
from helpers.runs.train import marked_processes, read_json_lines, read_metrics, steps_of


def arguments_of(engine, policy: Path, folder: Path, model: str, *more: str) -> list[str]:
    """A run in `folder` on an engine, rewarded by a model with these arguments."""
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    return [
        f"model.path={policy}",
        f"data.path={data}",
        f"train.run_dir={folder / 'run'}",
        f"reward.functions=[{{name: reward_model, weight: 2.0, arguments: {model}}}]",
        f"rollout.base_urls=[{engine.servers.base_urls[0]}]",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
        *more,
    ]


@pytest.mark.slow
def test_a_run_compares_the_steps_of_a_process_reward_model_and_outlives_its_server(
    live_engine, tied_model, tmp_path
):
    folder, run_dir = process_model_folder(tmp_path / "process"), tmp_path / "run"
    vllm = "{dtype: float32, max_model_len: 256}"
    model = f"{{path: {folder}, step_tag: {STEP_TAG}, step_separator: e, vllm: {vllm}}}"
    options = ["train.num_steps=3", "grpo.supervision=process", "rollout.max_completion_length=100"]
    arguments = arguments_of(live_engine, tied_model, tmp_path, model, *options)

    def servers(job: Job) -> list[psutil.Process]:
        found = []
        for process in marked_processes(job.mark):
            with suppress(psutil.Error):
                if "--runner=pooling" in process.cmdline():
                    found.append(process)
        return found

    with Job(arguments, 1, tmp_path / "logs", token=live_engine.servers.token) as job:
        job.wait_for(lambda: steps_of(run_dir), 200)
        for server in servers(job):
            with suppress(psutil.NoSuchProcess):
                server.kill()
        ended = job.end(200)
    assert ended.exit_codes == [0], ended.output
    assert ended.survivors == []
    assert "it is being restarted" in ended.output
    rows = read_json_lines(run_dir / "completions.jsonl")
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["grad_norm"] > 0
        assert record["reward/failed"] == 0
        scores = [r["rewards"]["reward_model"] for r in rows if r["step"] == record["step"]]
        assert record["reward/reward_model/mean"] == pytest.approx(sum(scores) / len(scores))
    for row in rows:
        assert row["reward"] == pytest.approx(2 * row["rewards"]["reward_model"])
        of_steps = [turn["reward"] for turn in row["turns"] if turn["reward"] is not None]
        assert row["rewards"]["reward_model"] == min(of_steps)
    assert any(len(row["turns"]) > 1 for row in rows)


@pytest.mark.slow
def test_a_reward_model_that_shares_gpus_wakes_for_each_generation_and_evaluation(
    live_engine, tied_model, tmp_path
):
    folder, run_dir = reward_model_folder(tmp_path / "scalar"), tmp_path / "run"
    vllm = "{dtype: float32, max_model_len: 256, gpu_memory_utilization: 0.1}"
    model = f"{{path: {folder}, share_gpus: true, vllm: {vllm}}}"
    options = ["rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.5"]
    options += ["train.num_steps=2", f"eval.data.path={tmp_path / 'data.jsonl'}"]
    options += ["eval.interval=1", "eval.pass_threshold=0"]
    arguments = arguments_of(live_engine, tied_model, tmp_path, model, *options)
    with Job(arguments, 1, tmp_path / "logs", token=live_engine.servers.token) as job:
        ended = job.end(200)
    assert ended.exit_codes == [0], ended.output
    assert ended.survivors == []
    evaluated, *trained = read_metrics(run_dir)
    assert [record["step"] for record in trained] == [1, 2]
    assert all(record["reward/failed"] == 0 < record["grad_norm"] for record in trained)
    assert all(record["eval/failed"] == 0 for record in [evaluated, *trained])
    # Asleep before the first, it wakes for two generations and the evaluations around them.
    log = (run_dir / "logs" / "reward_model_0.log").read_text()
    assert (log.count("to fall asleep"), log.count("wake up the engine")) == (1 + 5, 5)
