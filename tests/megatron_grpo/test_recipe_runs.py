"""Whole runs with `grpo` options that affect more than one step, or more than the loss."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from helpers.engines.live import TestEngine, reference_logprobs
from helpers.oracle.grpo import oracle_advantages, oracle_sequence_kl
from helpers.runs.jobs import Runs, finish_job, write_sums
from helpers.runs.train import read_json_lines, read_metrics, results
from megatron_grpo.algorithm.kl import adapted_beta
from megatron_grpo.checkpoints.experience_file import READY, read_experience
from megatron_grpo.config.file import load_config
from megatron_grpo.rollout.replay import generation_folder
from megatron_grpo.rollout.services import load_stream

REWARD = """
def mostly(completions, **_):
    '''Share of digits; nothing is known of the last completion of every prompt.'''
    shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    return [*shares[:-1], None]
"""
TARGET, HORIZON = 0.01, 100
RECIPE = [
    "grpo.steps_per_generation=2",
    "grpo.num_iterations=2",
    "grpo.advantage_estimator=rloo",  # the divergence becomes part of the reward
    "grpo.importance_sampling_level=sequence",
    "grpo.top_entropy_quantile=0.5",
    "grpo.entropy_coef=0.01",
    f"grpo.kl_target={TARGET}",
    f"grpo.kl_horizon={HORIZON}",
    "grpo.rollout_importance_sampling_mode=sequence_mask",
    "grpo.off_policy_mask_threshold=0.001",
    "rollout.temperature=0.7",
]


@pytest.fixture(scope="module")
def recipe_runs(
    tmp_path_factory: pytest.TempPathFactory, tied_model: Path, live_engine: TestEngine
) -> Runs:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "reward.py").write_text(REWARD)
    arguments = [
        f"model.path={tied_model}",
        f"data.path={write_sums(folder)}",
        f"reward.functions=[{folder / 'reward.py'}:mostly]",
        "reward.max_failed_fraction=0.25",
        *RECIPE,
    ]
    return Runs(arguments, live_engine, folder, ("data",))


@pytest.fixture(scope="module")
def whole(recipe_runs: Runs) -> Path:
    """The recipe's run of four steps on one generation, and one of the next."""
    keeps = ["train.export_interval=4", "train.save_generations=true"]
    recipe_runs.finish("whole", *keeps, "train.num_steps=5")
    return recipe_runs.folder / "whole"


@pytest.mark.long
def test_a_completion_without_a_score_is_masked_and_counted(whole):
    record, rows = read_metrics(whole)[0], read_json_lines(whole / "completions.jsonl")
    assert record["reward/failed"] == 4  # one of each prompt
    failed = [row for row in rows[:16] if row["rewards"]["mostly"] is None]
    assert len(failed) == 4
    for row in failed:
        assert (row["advantage"], row["entropy"], row["logprob_gap"]) == (0.0, None, None)
    tokens = [r["num_response_tokens"] for r in read_metrics(whole)[:2]]
    assert sum(tokens) == pytest.approx(12 * record["completions/mean_length"], rel=0.2)


def test_metrics_say_what_each_option_did(whole):
    records, rows = read_metrics(whole), read_json_lines(whole / "completions.jsonl")
    for record in records:
        assert record["entropy/high_ratio"] == pytest.approx(0.5, abs=0.05)
        assert record["rollout/weight_mean"] == pytest.approx(1, abs=1e-3)
        assert record["rollout/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert record["rollout/logprob_gap_mean"] < 1e-4  # the temperature is that of the engine
    assert records[0]["rollout/stale_gap_mean"] < 1e-4 < records[3]["rollout/stale_gap_mean"]
    # The second pass leaves out exactly what the first has made less likely.
    assert records[0]["off_policy_mask_ratio"] == records[4]["off_policy_mask_ratio"] == 0
    scored = [row for row in rows[:8] if row["rewards"]["mostly"] is not None]
    negative = [row for row in scored if row["advantage"] < 0]
    assert 0 < records[2]["off_policy_mask_ratio"] <= len(negative) / len(scored)
    for before, after in pairwise(records):
        assert after["beta"] == adapted_beta(before["beta"], before, TARGET, 8, HORIZON)


def test_advantages_subtract_the_divergence_by_its_weight(whole):
    """In the second generation, as the policy had moved by then."""
    cfg = load_config(whole / "config.yaml")
    shape, tokenizer = read_shape(cfg.model.path), load_tokenizer(cfg.model.path)
    prompts = load_stream(cfg, shape, tokenizer).prompts
    saved = read_experience(generation_folder(whole, 1), prompts, READY)
    old, ref = (
        [reference_logprobs(folder, sample, 0.7).double() for sample in saved.samples]
        for folder in (whole / "hf_step_4", cfg.model.path)
    )
    kl, beta = oracle_sequence_kl(old, ref), read_metrics(whole)[4]["beta"]
    rewards = [reward - beta * each for reward, each in zip(saved.totals.tolist(), kl, strict=True)]
    groups = [rewards[i : i + 4] for i in range(0, 16, 4)]
    expected = oracle_advantages(groups, estimator="rloo", scale="none")
    by_sample = {
        (sample.prompt.index, sample.sample_index): advantage
        for sample, advantage in zip(saved.samples, expected, strict=True)
    }
    rows = [row for row in read_json_lines(whole / "completions.jsonl") if row["step"] == 5]
    assert len(rows) == 8
    for row in rows:
        known = by_sample[row["prompt_index"], row["sample_index"]]
        assert row["advantage"] == pytest.approx(known, abs=1e-6)


@pytest.mark.long
def test_another_model_imitates_the_completions_of_a_run(whole, recipe_runs, other_model, tmp_path):
    """Supervised fine-tuning on saved generations: the loss is their mean cross-entropy."""
    _, *data_and_rewards = recipe_runs.arguments[:4]
    finish_job(
        tmp_path / "run",
        f"model.path={other_model}",
        *data_and_rewards,
        f"train.replay={whole}",
        "train.num_steps=2",
        "grpo.loss_type=sft",
        "grpo.steps_per_generation=2",
        "optimizer.lr=1e-3",
        engine=None,
    )
    rows = [row for row in read_json_lines(tmp_path / "run/completions.jsonl") if row["step"] == 1]
    cfg = load_config(whole / "config.yaml")
    prompts = load_stream(cfg, read_shape(other_model), load_tokenizer(other_model)).prompts
    saved = read_experience(generation_folder(whole, 0), prompts, READY)
    samples = {(each.prompt.index, each.sample_index): each for each in saved.samples}
    terms = [
        reference_logprobs(other_model, samples[row["prompt_index"], row["sample_index"]])
        for row in rows
        if row["reward"] is not None  # completions without a reward are left out
    ]
    losses = [record["loss"] for record in read_metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(-torch.cat(terms).mean().item(), abs=1e-5)
    assert losses[1] < losses[0] - 0.01


@pytest.mark.slow
def test_run_resumed_inside_a_generation_makes_it_anew(recipe_runs, whole):
    runs = []
    for name in ("resumed", "again"):
        for num_steps in (1, 5):
            recipe_runs.finish(name, f"train.num_steps={num_steps}")
        runs.append(recipe_runs.folder / name)
    resumed, again = map(results, runs)
    assert resumed == again
    assert resumed[0] == results(whole)[0] and resumed[1] != results(whole)[1]
    rows = read_json_lines(runs[0] / "completions.jsonl")
    # The first pass over the second half, the second over the first half, the next generation.
    found = Counter((row["step"], row["policy_version"]) for row in rows)
    assert found == {(1, 0): 8, (2, 1): 8, (3, 1): 8, (5, 4): 8}
    anew = [(row["prompt_index"], row["sample_index"]) for row in rows if row["step"] in (2, 3)]
    first = {row["prompt_index"] for row in rows if row["step"] == 1}
    assert len(set(anew)) == 16 and first <= {prompt for prompt, _ in anew}
