"""Whole runs of `megatron-grpo train` on a tiny model: real ranks, a real vLLM engine."""

import json
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from demo.make_sums import sums as all_sums
from helpers.engines.live import TestEngine
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import CONTEXT
from helpers.runs.jobs import Ended, Job, Sabotage
from helpers.runs.sabotage import ListForwards
from helpers.runs.train import finish_run, read_json_lines, read_metrics
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.run import process_groups
from parallel import ParallelDims

KL_TARGET, KL_HORIZON = 0.01, 16  # beta changes by a fifth with each generation of 16


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
    return [
        f"model.path={tied_model}",
        f"data.path={sums}",
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


def finish(
    run_dir: Path,
    engine: TestEngine,
    axes: tuple,
    *arguments: str,
    sabotage: Sabotage | None = None,
) -> Ended:
    """A run on forked ranks with `axes` of size 2 and a running engine."""
    url = f"rollout.base_urls=[{engine.servers.base_urls[0]}]"
    job = Job(
        [*arguments, *layout(*axes), url, f"train.run_dir={run_dir}"],
        2 ** len(axes),
        run_dir.parent / "logs_of_ranks",
        token=engine.servers.token,
        sabotage=sabotage,
    )
    with job:
        ended = job.end(120)
    assert ended.exit_codes == [0] * len(job.ranks), ended.output
    return ended


def test_the_run_directory_holds_everything_that_is_promised(full_run: Path) -> None:
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


def test_the_divergence_counts_by_the_weight_that_the_step_before_has_adapted(
    full_run: Path,
) -> None:
    """On-policy, with equal lengths, the loss is the penalty alone."""
    first, second, _ = read_metrics(full_run)
    assert (first["beta"], second["beta"]) == (0.04, 0.04 * 0.8)
    assert second["loss"] == pytest.approx(second["beta"] * second["kl"], rel=1e-4)


def test_each_export_has_its_own_folder_and_that_of_the_last_step_is_hf(full_run: Path) -> None:
    assert {path.name for path in full_run.glob("hf*")} == {"hf_step_1", "hf_step_2", "hf"}
    first, last = (
        AutoModelForCausalLM.from_pretrained(full_run / name).state_dict()
        for name in ("hf_step_1", "hf")
    )
    assert any(not torch.equal(first[name], last[name]) for name in last)


def test_the_gap_of_the_probe_is_a_metric_of_the_first_step(full_run: Path) -> None:
    first, *others = read_metrics(full_run)
    assert 0 < first["probe/logprob_gap_mean"] < first["probe/logprob_gap_max"] < 1e-4
    assert not any(name.startswith("probe/") for record in others for name in record)


def test_each_forward_of_policy_and_reference_counts_as_progress(
    arguments: list[str], live_engine: TestEngine, tmp_path: Path
) -> None:
    forwards = ListForwards(tmp_path / "forwards")
    finish(tmp_path / "run", live_engine, (), *arguments, "train.num_steps=1", sabotage=forwards)
    done = forwards.file.read_text().split()
    assert done.count("tick") == done.count("forward") > 2


def test_a_run_continues_at_another_layout_as_the_run_that_was_not_interrupted(
    full_run: Path, arguments: list[str], live_engine: TestEngine, tmp_path: Path
) -> None:
    """On-policy, with equal lengths, the first loss is 0; others are the KL penalty."""
    run_dir = tmp_path / "resumed"
    for num_steps, axes in ((2, ("pipeline", "context")), (3, ("data",))):
        finish(run_dir, live_engine, axes, *arguments, f"train.num_steps={num_steps}")
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
def test_a_run_can_be_extended_and_its_learning_rate_follows_the_new_length(
    arguments: list[str], live_engine: TestEngine, tmp_path: Path
) -> None:
    for num_steps in (1, 3, 3):
        ended = finish(
            tmp_path / "run",
            live_engine,
            (),
            *arguments,
            f"train.num_steps={num_steps}",
            "train.export_interval=1",
            "optimizer.lr_decay_style=linear",
        )
    assert "is complete: 3 of 3 steps" in ended.output and "is loaded" not in ended.output
    exports = {path.name for path in (tmp_path / "run").glob("hf*")}
    assert exports == {"hf_step_1", "hf_step_2", "hf"}
    rates = [record["lr"] for record in read_metrics(tmp_path / "run")]
    assert rates[1:] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3])


@pytest.mark.slow
def test_a_new_run_starts_from_the_checkpoint_of_another_with_another_config(
    arguments: list[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    other = ("optimizer.lr=2e-3", "rollout.max_completion_length=8", f"train.init_from={first}")
    options = [*arguments, *layout(), "train.num_steps=1"]
    for run_dir, more in ((first, ()), (second, other)):
        run = finish_run(*options, *more, f"train.run_dir={run_dir}")
        assert run.exit_code == 0, run.output
    assert f"starting from the weights and moments in {first}/checkpoints/step_1" in run.output
    (record,) = read_metrics(second)
    assert (record["step"], record["lr"]) == (1, 2e-3)
    assert record["kl"] > 1e-6, "the reference is the model in model.path"
    assert record["rollout/logprob_gap_mean"] < 1e-3, "the engines have the weights of the start"


def test_no_collective_ends_a_wait_before_the_watch_does(tied_model: Path) -> None:
    """Rank 0 may score for hours while the others wait for it."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        timeouts = pool.submit(timeouts_of_groups, tied_model).result(timeout=60)
    assert len(timeouts) > 5 and min(timeouts) >= timedelta(days=1), timeouts


def timeouts_of_groups(model: Path) -> list[timedelta]:
    """Of the groups of a rank, and of all."""
    cfg = tiny_config(model, ParallelDims(), "rollout.startup_timeout=1", "reward.timeout=1")
    with process_groups(cfg, RankPlace(0, 0, 1, num_hosts=1), dist.HashStore()) as groups:
        found = [group for group in vars(groups).values() if isinstance(group, dist.ProcessGroup)]
        cpu = torch.device("cpu")
        return [group._get_backend(cpu).options._timeout for group in [*found, dist.group.WORLD]]
