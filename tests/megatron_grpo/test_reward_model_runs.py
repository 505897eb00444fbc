"""Whole runs that are rewarded by a model, with a real vLLM of it beside the engine's."""

from contextlib import suppress

import psutil
import pytest

from helpers.jobs import Job
from helpers.reward_models import STEP_TAG, process_model_folder
from helpers.runs import marked_processes, read_json_lines, read_metrics, steps_of


@pytest.mark.slow
def test_a_run_compares_the_steps_of_a_process_reward_model_and_outlives_its_server(
    live_engine, tied_model, tmp_path
):
    folder, data, run_dir = (
        process_model_folder(tmp_path / "process"),
        tmp_path / "data.jsonl",
        tmp_path / "run",
    )
    data.write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    vllm = "{dtype: float32, max_model_len: 256}"
    model = f"{{path: {folder}, step_tag: {STEP_TAG}, step_separator: e, vllm: {vllm}}}"
    arguments = [
        f"model.path={tied_model}",
        f"data.path={data}",
        f"train.run_dir={run_dir}",
        "train.num_steps=3",
        "grpo.supervision=process",
        "rollout.max_completion_length=100",
        f"reward.functions=[{{name: reward_model, weight: 2.0, arguments: {model}}}]",
        f"rollout.base_urls=[{live_engine.servers.base_urls[0]}]",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
    ]

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
