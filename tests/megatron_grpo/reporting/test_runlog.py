import json
import os
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.conversions import file_size_limit
from helpers.oracle.policies import tiny_config
from helpers.runs.rewards import sample_of
from megatron_grpo.batch.token_log import VALUES
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.samples import Sample
from megatron_grpo.launch.process import Preempted
from megatron_grpo.reporting.metrics import gap_metrics, staleness_metrics
from megatron_grpo.reporting.runlog import SYMPTOMS, RunLog, Symptoms
from parallel import ParallelDims


def run_log(cfg: Config, first_step: int) -> RunLog:
    return RunLog(cfg, first_step, load_tokenizer(cfg.model.path))


def test_close_reports_failures_and_why_the_run_ends(tied_model: Path, tmp_path: Path, capfd):
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}")
    with pytest.raises(Preempted), closing(run_log(cfg, 0)) as log:
        log.tracking.log(1, {"reward": 1.0}, [])  # too little to draw
        os.close(log.timeline._file.fileno())
        raise Preempted("step 1 saved")
    output = capfd.readouterr().err
    assert "timeline.json could not be finished: [Errno 9] " in output
    assert "curves.png could not be drawn: " in output


def test_close_is_silent_about_curves_before_the_first_step(
    tied_model: Path, tmp_path: Path, capfd
):
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}")
    with closing(run_log(cfg, 0)) as log:
        log.tracking.amend(0, {"eval/pass@1": 0.5})
    assert "could not be drawn" not in capfd.readouterr().err


def test_a_run_of_adapters_says_how_to_merge_them(tied_model: Path, tmp_path: Path, capsys):
    run_dir = tmp_path / "run"
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={run_dir}", "lora.r=4")
    with closing(run_log(cfg, 0)) as log:
        log.finish(1, stopped_by=None)
    merge = f"checkpoint-convert merge --base {tied_model} --adapter {run_dir}/hf"
    said = capsys.readouterr().out
    assert f"the LoRA adapter is {run_dir}/hf; `{merge} --out {run_dir}/merged`" in said


def test_tokens_per_second_are_of_a_whole_generation(tied_model: Path, tmp_path: Path):
    """Two optimizer batches, twice each: the first of the four steps waits for the generation."""
    options = ["grpo.steps_per_generation=2", "grpo.num_iterations=2"]
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}", *options)
    with closing(run_log(cfg, 0)) as log:
        found = [log._tokens_per_second(800, seconds) for seconds in (7, 1, 1, 1) * 2]
        assert found == pytest.approx([200 / 7, 400 / 8, 600 / 9, *[800 / 10] * 5])


def test_has_evaluation_wants_that_of_each_set(tied_model: Path, tmp_path: Path):
    def is_evaluated(*options: str) -> bool:
        run_dir = f"train.run_dir={tmp_path / 'run'}"
        cfg = tiny_config(tied_model, ParallelDims(), run_dir, *options)
        with closing(run_log(cfg, 2)) as log:
            return log.has_evaluation(2)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        json.dumps({"step": 2, "eval/a/pass@1": 0.5, "eval/a/num_prompts": 6.0}) + "\n"
    )
    assert is_evaluated("eval.sets.a.data={}")
    assert not is_evaluated("eval.sets.a.data={}", "eval.sets.b.data={}")
    assert not is_evaluated("eval.data={}")


def test_run_log_on_a_full_disk_leaves_the_config(tied_model: Path, tmp_path: Path):
    """A run whose config cannot be read could not be resumed."""
    cfg = tiny_config(tied_model, ParallelDims(), f"train.run_dir={tmp_path / 'run'}")
    saved = tmp_path / "run" / "config.yaml"
    with closing(run_log(cfg, 0)):
        pass
    longer = cfg.model_copy(update={"train": cfg.train.model_copy(update={"num_steps": 77})})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # A limit on file sizes stands for a full disk, in this process only.
        with file_size_limit(100), pytest.raises(OSError, match="File too large"):
            run_log(longer, 0)
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert saved.read_text() == dump_config(cfg)
    with closing(run_log(longer, 0)):
        pass
    assert load_config(saved) == longer


def test_staleness_metrics_are_shares_of_generations():
    """Generation 2 has two steps; its completions began in generations 0 and 1."""
    rollout = RolloutConfig(max_completion_length=8, max_staleness=2, in_flight_updates=True)
    cut = sample(versions=((0, 1), (2, 2), (4, 3)))
    found = staleness_metrics(2, [cut, sample(versions=()), sample(versions=())], 2, rollout)
    assert found == {
        "rollout/staleness_mean": pytest.approx((1 * 2 + 14 * 1 + 3 * 0) / 18),
        "rollout/staleness_max": 2,
        "rollout/mixed_versions_frac": pytest.approx(1 / 3),
        "rollout/mixed_versions_token_frac": pytest.approx(5 / 18),
        "rollout/staleness_frac/0": pytest.approx(3 / 18),
        "rollout/staleness_frac/1": pytest.approx(14 / 18),
        "rollout/staleness_frac/2": pytest.approx(1 / 18),
    }


@pytest.mark.parametrize("recompute", [True, False])
def test_gap_metrics_separate_weights_from_kept_caches(recompute):
    """A push falls into the first of two turns; half a completion of old weights is logged."""
    rollout = RolloutConfig(
        max_completion_length=8,
        max_staleness=2,
        in_flight_updates=True,
        recompute_kv_cache=recompute,
    )
    turns = replace(sample(versions=((2, 1), (4, 5))), loss_mask=[1, 1, 1, 0, 1, 1])
    old, values = sample(versions=()), torch.zeros(11, len(VALUES))
    values[:, VALUES.index("mask")] = torch.tensor([1, 1, 1, 0, 1, 1] + 5 * [1.0])
    values[:, VALUES.index("gap")] = torch.tensor([3, -7, 9, 99, 1, 2] + 5 * [5.0])
    found = gap_metrics(4, [turns, old], values, rollout)
    kept = {"stale": (3 + 25) / 6, "current": 3 / 2, "current_kept_cache": (7 + 9) / 2}
    computed_anew = {"stale": (3 + 25) / 6, "current": (7 + 9 + 3) / 4}
    assert found == {
        f"rollout/logprob_gap_mean/{name}": pytest.approx(mean)
        for name, mean in (computed_anew if recompute else kept).items()
    }


def sample(versions: tuple[tuple[int, int], ...]) -> Sample:
    """A completion of six tokens; version 2 if `versions` is empty."""
    version = versions[0][0] if versions else 2
    return sample_of("", {}, completion_ids=[7] * 6, policy_version=version, versions=versions)


def test_a_first_step_without_signal_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    symptoms = Symptoms()
    symptoms.check(1, {"frac_reward_zero_std": 0.9, "completions/clipped_ratio": 0.94})
    [cut] = capsys.readouterr().err.splitlines()
    assert cut.startswith("step 1: 94% of the completions reached ") and "raise it" in cut
    symptoms.check(2, {"frac_reward_zero_std": 1.0})  # not the first: chance
    assert capsys.readouterr().err == ""
    Symptoms().check(1, {"frac_reward_zero_std": 1.0})
    assert "grpo.dynamic_sample=true" in capsys.readouterr().err


PAGE = Path(__file__).parents[3] / "docs" / "symptoms.md"
STEPS = {
    "frac_reward_zero_std": ([0.5, 0.5, 0.5, 0.5], [0.8, 0.9, 1.0]),
    "completions/clipped_ratio": ([0.4] * 4, [0.5] * 3),
    "entropy": ([2.0, 1.0, 0.3, 0.3], [0.09, 0.09, 0.09]),
    "completions/mean_length": ([100.0, 200, 290, 290], [600.0] * 3),
    "rollout/logprob_gap_mean": ([0.01, 0.01, 0.01, 0.04], [0.06] * 3),
    "grad_norm": ([0.01] * 3 + [0.9] * 3, [2.0] * 3),
    "kl": ([0.1] * 3 + [0.9] * 3, [1.5] * 3),
    "clip_ratio/region_mean": ([0.02] * 3 + [0.19] * 3, [0.25] * 3),
    "tokens_per_second": ([900.0, 900, 900, 400], [290.0] * 3),
}
"""Metrics of steps without the symptom, and of following steps with it."""


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.metric)
def test_symptoms_are_explained_once(symptom, capsys: pytest.CaptureFixture[str]) -> None:
    symptoms, (healthy, ill) = Symptoms(), STEPS[symptom.metric]
    for step, value in enumerate(healthy):
        symptoms.check(step, {symptom.metric: value})
    assert capsys.readouterr().err == ""
    for step, value in enumerate(ill * 2):
        symptoms.check(step, {symptom.metric: value})
    [line] = capsys.readouterr().err.splitlines()
    heading = line.rpartition("#")[2]
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert heading in {text.lower().replace(" ", "-") for text in headings}
    section = PAGE.read_text().lower().partition(heading.replace("-", " "))[2].partition("\n## ")[0]
    assert f"🔔 `{symptom.metric}`" in section
