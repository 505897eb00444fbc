"""Whole runs of `megatron-grpo train` on a tiny model: real ranks, a real vLLM engine."""

from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import CONTEXT
from helpers.runs.jobs import finish_job, layout, write_sums
from helpers.runs.sabotage import ListForwards
from helpers.runs.train import finish_run, read_json_lines, read_metrics
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.rank import process_groups
from parallel import ParallelDims

KL_TARGET, KL_HORIZON = 0.01, 16  # beta changes by a fifth with each generation of 16


@pytest.fixture(scope="module")
def arguments(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        f"model.path={tied_model}",
        f"data.path={write_sums(tmp_path_factory.mktemp('data'))}",
        "train.num_steps=2",
        f"grpo.kl_target={KL_TARGET}",
        f"grpo.kl_horizon={KL_HORIZON}",
    ]


@pytest.fixture(scope="module")
def full_run(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two ranks, with an engine that the run starts, and an export of each."""
    run_dir = tmp_path_factory.mktemp("runs") / "full"
    options = ["train.num_steps=3", "train.export_interval=1", f"train.run_dir={run_dir}"]
    run = finish_run(*arguments, *layout("tensor"), *options)
    assert run.exit_code == 0, run.output
    return run_dir


def test_run_directory_holds_the_documented_files(full_run):
    for name in ("config.yaml", "completions.jsonl", "curves.png", "logs", "checkpoints/LATEST"):
        assert (full_run / name).exists(), name
    first, *others = read_metrics(full_run)
    # The pushes at a start count towards no step.
    assert all(record.keys() >= {"time/push", "time/verify_weights"} for record in others)
    for record in (first, *others):
        assert record.keys() >= {"epoch", "reward_std", "completions/mean_length", "time/generate"}
    # The second step was sampled from weights that have been pushed.
    assert others[0]["rollout/logprob_gap_max"] < 1e-4
    completions = read_json_lines(full_run / "completions.jsonl")
    assert [row["policy_version"] for row in completions] == [0] * 16 + [1] * 16 + [2] * 16


def test_kl_weight_is_that_of_the_step_before(full_run):
    """On-policy, with equal lengths, the loss is the penalty alone."""
    first, second, _ = read_metrics(full_run)
    assert (first["beta"], second["beta"]) == (0.04, 0.04 * 0.8)
    assert second["loss"] == pytest.approx(second["beta"] * second["kl"], rel=1e-4)


def test_exports_have_folders_and_the_last_is_hf(full_run):
    assert {path.name for path in full_run.glob("hf*")} == {"hf_step_1", "hf_step_2", "hf"}
    first, last = (
        AutoModelForCausalLM.from_pretrained(full_run / name).state_dict()
        for name in ("hf_step_1", "hf")
    )
    assert any(not torch.equal(first[name], last[name]) for name in last)


def test_probe_gap_is_a_metric_of_the_first_step(full_run):
    first, *others = read_metrics(full_run)
    assert 0 < first["probe/logprob_gap_mean"] < first["probe/logprob_gap_max"] < 1e-4
    assert not any(name.startswith("probe/") for record in others for name in record)


def test_forwards_count_as_progress(arguments, live_engine, tmp_path):
    forwards = ListForwards(tmp_path / "forwards")
    how = {"engine": live_engine, "sabotage": forwards}
    finish_job(tmp_path / "run", *arguments, "train.num_steps=1", **how)
    done = forwards.file.read_text().split()
    assert done.count("tick") == done.count("forward") > 2


def test_run_continues_at_another_layout(full_run, arguments, live_engine, tmp_path):
    """On-policy, with equal lengths, the first loss is 0; others are the KL penalty."""
    run_dir = tmp_path / "resumed"
    for num_steps, axes in ((2, ("pipeline", "context")), (3, ("data",))):
        steps = f"train.num_steps={num_steps}"
        finish_job(run_dir, *arguments, steps, engine=live_engine, axes=axes)
    completions, expected = (
        [row["completion"] for row in read_json_lines(folder / "completions.jsonl")]
        for folder in (run_dir, full_run)
    )
    assert completions == expected
    for record, reference in zip(read_metrics(run_dir), read_metrics(full_run), strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=1e-7)
        for name in ("grad_norm", "kl"):
            assert record[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-7)
    assert read_metrics(full_run)[1]["loss"] > 1e-3


@pytest.mark.long
def test_extended_run_has_the_rates_of_its_new_length(arguments, live_engine, tmp_path):
    for num_steps in (1, 3, 3):
        options = ["train.export_interval=1", "optimizer.lr_decay_style=linear"]
        options.append(f"train.num_steps={num_steps}")
        ended = finish_job(tmp_path / "run", *arguments, *options, engine=live_engine)
    assert "is complete: 3 of 3 steps" in ended.output and "is loaded" not in ended.output
    exports = {path.name for path in (tmp_path / "run").glob("hf*")}
    assert exports == {"hf_step_1", "hf_step_2", "hf"}
    rates = [record["lr"] for record in read_metrics(tmp_path / "run")]
    assert rates[1:] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3])


@pytest.mark.slow
def test_init_from_starts_at_the_checkpoint_of_another(arguments, live_engine, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    other = ("optimizer.lr=2e-3", "rollout.max_completion_length=8", f"train.init_from={first}")
    for run_dir, more in ((first, ()), (second, other)):
        options = [*arguments, "train.num_steps=1", *more]
        ended = finish_job(run_dir, *options, engine=live_engine)
    assert f"starting from the weights and moments in {first}/checkpoints/step_1" in ended.output
    (record,) = read_metrics(second)
    assert (record["step"], record["lr"]) == (1, 2e-3)
    assert record["kl"] > 1e-6, "the reference is the model in model.path"
    assert record["rollout/logprob_gap_mean"] < 1e-3, "the engines have the weights of the start"


def test_process_groups_wait_longer_than_the_watchdog(tied_model):
    """Rank 0 may score for hours while the others wait for it."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        timeouts = pool.submit(timeouts_of_groups, tied_model).result(timeout=60)
    assert len(timeouts) > 5 and min(timeouts) >= timedelta(days=1), timeouts


def timeouts_of_groups(model: Path) -> list[timedelta]:
    """Time-outs of a rank's groups, and of the group of all ranks."""
    cfg = tiny_config(model, ParallelDims(), "rollout.startup_timeout=1", "reward.timeout=1")
    with process_groups(cfg, RankPlace(0, 0, 1, num_hosts=1), dist.HashStore()) as groups:
        found = [group for group in vars(groups).values() if isinstance(group, dist.ProcessGroup)]
        cpu = torch.device("cpu")
        return [group._get_backend(cpu).options._timeout for group in [*found, dist.group.WORLD]]
