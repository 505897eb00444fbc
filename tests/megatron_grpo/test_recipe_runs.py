"""Whole runs with `grpo` options that affect more than one step, or more than the loss."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from demo.make_sums import sums
from helpers.engines.live import TestEngine, reference_logprobs
from helpers.oracle.grpo import oracle_advantages, oracle_sequence_kl
from helpers.runs.jobs import Job
from helpers.runs.train import read_json_lines, read_metrics, results
from megatron_grpo.algorithm.kl import adapted_beta
from megatron_grpo.checkpoints.experience_file import READY, read_experience
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.run_dir import bearer
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
    "grpo.advantage_estimator=rloo",  # and so the divergence is a part of the reward
    "grpo.importance_sampling_level=sequence",
    "grpo.top_entropy_quantile=0.5",
    "grpo.entropy_coef=0.01",
    f"grpo.kl_target={TARGET}",
    f"grpo.kl_horizon={HORIZON}",
    "grpo.rollout_importance_sampling_mode=sequence_mask",
    "grpo.off_policy_mask_threshold=0.001",
    "rollout.temperature=0.7",
]


class Runs:
    """Starts runs of two ranks on a warm engine, and reads what they leave."""

    def __init__(self, folder: Path, model: Path, engine: TestEngine) -> None:
        self.folder, self.model, self.engine = folder, model, engine
        (folder / "reward.py").write_text(REWARD)
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()))

    def finish(self, name: str, axis: str, *arguments: str) -> Path:
        run_dir = self.folder / name
        layout = [
            f"parallel.{each}_parallel_size={2 if each == axis else 1}"
            for each in ("tensor", "pipeline", "context", "data")
        ]
        common = [
            f"model.path={self.model}",
            f"data.path={self.folder / 'sums.jsonl'}",
            f"train.run_dir={run_dir}",
            f"rollout.base_urls=[{self.engine.servers.base_urls[0]}]",
            f"reward.functions=[{self.folder / 'reward.py'}:mostly]",
            "reward.max_failed_fraction=0.25",
        ]
        job = Job(
            [*common, *layout, *arguments],
            2,
            self.folder / f"logs_{name}",
            token=self.engine.servers.token,
        )
        with job:
            ended = job.end(180)
        assert ended.exit_codes == [0, 0], ended.output
        return run_dir


@pytest.fixture(scope="module")
def recipe_runs(
    tmp_path_factory: pytest.TempPathFactory, tied_model: Path, live_engine: TestEngine
) -> Runs:
    return Runs(tmp_path_factory.mktemp("recipes"), tied_model, live_engine)


@pytest.fixture(scope="module")
def whole(recipe_runs: Runs) -> Path:
    """The recipe's run of four steps on one generation, and one of the next."""
    keeps = ["train.export_interval=4", "train.save_generations=true"]
    return recipe_runs.finish("whole", "data", *RECIPE, *keeps, "train.num_steps=5")


@pytest.mark.long
def test_a_completion_without_a_score_is_masked_and_counted(whole: Path) -> None:
    record, rows = read_metrics(whole)[0], read_json_lines(whole / "completions.jsonl")
    assert record["reward/failed"] == 4  # one of each prompt
    failed = [row for row in rows[:16] if row["rewards"]["mostly"] is None]
    assert len(failed) == 4
    for row in failed:
        assert (row["advantage"], row["entropy"], row["logprob_gap"]) == (0.0, None, None)
    tokens = [r["num_response_tokens"] for r in read_metrics(whole)[:2]]
    assert sum(tokens) == pytest.approx(12 * record["completions/mean_length"], rel=0.2)


def test_metrics_say_what_each_option_did(whole: Path) -> None:
    records, rows = read_metrics(whole), read_json_lines(whole / "completions.jsonl")
    for record in records:
        assert record["entropy/high_ratio"] == pytest.approx(0.5, abs=0.05)
        assert record["rollout/weight_mean"] == pytest.approx(1, abs=1e-3)
        assert record["rollout/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert record["rollout/logprob_gap_mean"] < 1e-4  # the temperature is that of the engine
    assert records[0]["rollout/stale_gap_mean"] < 1e-4 < records[3]["rollout/stale_gap_mean"]
    # In the second pass what the first has made less likely is left out, and nothing else.
    assert records[0]["off_policy_mask_ratio"] == records[4]["off_policy_mask_ratio"] == 0
    scored = [row for row in rows[:8] if row["rewards"]["mostly"] is not None]
    negative = [row for row in scored if row["advantage"] < 0]
    assert 0 < records[2]["off_policy_mask_ratio"] <= len(negative) / len(scored)
    for before, after in pairwise(records):
        assert after["beta"] == adapted_beta(before["beta"], before, TARGET, 8, HORIZON)


def test_advantages_are_of_rewards_less_the_divergence_by_the_weight_of_their_step(
    whole: Path,
) -> None:
    """Of the second generation: the policy had moved by then."""
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


@pytest.mark.slow
def test_a_run_that_ended_inside_a_generation_makes_it_anew_for_the_steps_that_are_left(
    recipe_runs: Runs, whole: Path
) -> None:
    runs = []
    for name in ("resumed", "again"):
        for num_steps in (1, 5):
            run_dir = recipe_runs.finish(name, "data", *RECIPE, f"train.num_steps={num_steps}")
        runs.append(run_dir)
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


def num_operations(engine: TestEngine) -> Counter[str]:
    """How often vLLM was put to sleep, and was woken."""
    headers = bearer(engine.servers.token)
    page = httpx.get(f"{engine.servers.base_urls[0]}/metrics", headers=headers).text
    name = "vllm:sleep_mode_operation_duration_seconds_count"
    found = re.findall(rf'^{name}{{operation="(\w+)"}} (\S+)$', page, re.MULTILINE)
    return Counter({operation: int(float(count)) for operation, count in found})


@pytest.mark.long
def test_a_run_whose_engines_sleep_while_it_trains_is_the_same_run(
    recipe_runs: Runs,
) -> None:
    """Also where an evaluation wakes them between two steps on one generation."""
    options = ["grpo.steps_per_generation=2", "train.num_steps=3", "eval.interval=1"]
    options += [f"eval.data.path={recipe_runs.folder / 'sums.jsonl'}", "eval.max_prompts=4"]
    options.append("eval.reward.functions=[demo/rewards.py:share_of_digits]")
    awake = recipe_runs.finish("awake", "tensor", *options)
    before = num_operations(recipe_runs.engine)
    asleep = recipe_runs.finish("asleep", "tensor", *options, "rollout.enable_sleep_mode=true")
    assert results(asleep) == results(awake)
    during = num_operations(recipe_runs.engine) - before
    # It sleeps before the ranks build the model, before they compute the probe, and before each of
    # three steps; as many pushes wake its weights, and then its cache.
    assert during == {"sleep": 5, "wake": 10}
    assert [("time/sleep" in record) for record in read_metrics(asleep)[1:]] == [True] * 3
