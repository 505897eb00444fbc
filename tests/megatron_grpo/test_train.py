"""Whole runs of `megatron-grpo train` on a tiny model: real ranks, a real vLLM engine."""

import json
import time
import uuid
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.make_sums import sums as all_sums
from engines import TestEngine, random_prompts, wait_until
from runs import finish_run, marked_processes, read_json_lines, read_metrics, start_run


def layout(*axes: str) -> list[str]:
    """Overrides that give the named axes size 2 and the others size 1."""
    return [
        f"parallel.{axis}_parallel_size={2 if axis in axes else 1}"
        for axis in ("tensor", "pipeline", "context", "data")
    ]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in all_sums()))
    return path


@pytest.fixture(scope="module")
def arguments(tied_model: Path, sums: Path) -> list[str]:
    return [f"model.path={tied_model}", f"data.path={sums}", "train.num_steps=2"]


@pytest.fixture(scope="module")
def full_run(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on eight ranks, with an engine that the run starts itself."""
    run_dir = tmp_path_factory.mktemp("runs") / "full"
    run = finish_run(
        *arguments, *layout("tensor", "pipeline", "context"), f"train.run_dir={run_dir}"
    )
    assert run.exit_code == 0, run.output
    return run_dir


def test_the_run_directory_holds_everything_that_is_promised(full_run: Path) -> None:
    for name in ("config.yaml", "completions.jsonl", "curves.png", "logs", "checkpoints/LATEST"):
        assert (full_run / name).exists(), name
    for record in read_metrics(full_run):
        assert record.keys() >= {
            "step",
            "loss",
            "grad_norm",
            "reward",
            "reward_std",
            "kl",
            "completions/mean_length",
            "rollout/logprob_gap_mean",
            "time/step",
            "time/generate",
            "time/train",
            "time/push",
        }
    completions = read_json_lines(full_run / "completions.jsonl")
    assert [row["policy_version"] for row in completions] == [0] * 16 + [1] * 16


def test_rollout_and_trainer_agree_on_log_probabilities_right_after_a_push(full_run: Path) -> None:
    second_step = read_metrics(full_run)[1]  # sampled from weights that have been pushed
    assert second_step["rollout/logprob_gap_mean"] < 1e-5
    assert second_step["rollout/logprob_gap_max"] < 1e-4


def test_the_exported_model_generates_the_same_in_vllm_and_transformers(
    full_run: Path, vllm_engine: TestEngine
) -> None:
    exported = full_run / "hf"
    version = vllm_engine.push(exported)
    prompts = random_prompts(8)
    samples = vllm_engine.generate(
        prompts, num_generations=1, temperature=0.0, policy_version=version
    )
    model = AutoModelForCausalLM.from_pretrained(exported)
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = model.generate(
            torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=16
        )[0, len(prompt.token_ids) :].tolist()
        assert list(sample.completion_ids) == expected


@pytest.mark.parametrize(
    "axes", [(), ("data",), ("pipeline", "context")], ids=lambda a: " ".join(a)
)
def test_the_first_step_does_not_depend_on_the_layout(
    full_run: Path, arguments: list[str], vllm_engine: TestEngine, tmp_path: Path, axes: tuple
) -> None:
    run = finish_run(
        *arguments,
        *layout(*axes),
        "train.num_steps=1",
        f"train.run_dir={tmp_path}",
        f"rollout.base_urls=[{vllm_engine.servers.base_urls[0]}]",
    )
    assert run.exit_code == 0, run.output
    first, reference = read_metrics(tmp_path)[0], read_metrics(full_run)[0]
    completions = [
        [row["completion"] for row in read_json_lines(folder / "completions.jsonl")[:16]]
        for folder in (tmp_path, full_run)
    ]
    assert completions[0] == completions[1]
    # The loss is a sum of advantages whose total is 0: what is left of it is rounding.
    assert first["loss"] == pytest.approx(reference["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def test_a_run_continues_where_it_ended_at_another_layout(
    full_run: Path, arguments: list[str], vllm_engine: TestEngine, tmp_path: Path
) -> None:
    """Two steps at once, and one step, a restart and one step, are the same run."""
    run_dir = tmp_path / "resumed"
    url = f"rollout.base_urls=[{vllm_engine.servers.base_urls[0]}]"
    for num_steps, axes in ((1, ("tensor", "pipeline")), (2, ("data",))):
        run = finish_run(
            *arguments,
            *layout(*axes),
            url,
            f"train.run_dir={run_dir}",
            f"train.num_steps={num_steps}",
        )
        assert run.exit_code == 0, run.output
    resumed, reference = read_metrics(run_dir), read_metrics(full_run)
    assert [record["step"] for record in resumed] == [1, 2]
    assert resumed[1]["grad_norm"] == pytest.approx(reference[1]["grad_norm"], rel=1e-4)
    assert resumed[1]["kl"] == pytest.approx(reference[1]["kl"], rel=1e-4)
    assert resumed[1]["reward"] == reference[1]["reward"]


def test_a_generation_is_used_for_several_steps_and_passes(
    arguments: list[str], vllm_engine: TestEngine, tmp_path: Path
) -> None:
    run = finish_run(
        *arguments,
        *layout("tensor"),
        "train.num_steps=4",
        "grpo.steps_per_generation=2",
        "grpo.num_iterations=2",
        f"train.run_dir={tmp_path}",
        f"rollout.base_urls=[{vllm_engine.servers.base_urls[0]}]",
    )
    assert run.exit_code == 0, run.output
    records = read_metrics(tmp_path)
    assert len(records) == 4
    assert len(read_json_lines(tmp_path / "completions.jsonl")) == 16
    assert records[0]["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    for record in records[1:]:  # off-policy by now, against log-probabilities of the start
        assert abs(record["ratio/max"] - 1) > 1e-3
        assert record["rollout/logprob_gap_mean"] < 1e-5


def test_nothing_is_left_when_the_launcher_is_killed(arguments: list[str], tmp_path: Path) -> None:
    process = start_run(
        *arguments,
        *layout("pipeline"),
        "train.num_steps=500",
        f"train.run_dir={tmp_path}",
        mark=(mark := uuid.uuid4().hex),
    )
    try:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        names = [" ".join(child.cmdline()) for child in marked_processes(mark)]
        assert any("vllm" in name for name in names)
        assert sum("megatron_grpo.cli" in name for name in names) >= 2  # both ranks
    finally:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not marked_processes(mark), seconds=10)
