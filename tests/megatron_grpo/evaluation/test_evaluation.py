"""Evaluations: their metrics, and the samples of a real engine behind them."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.engines import random_prompts
from helpers.models import EOS_ID
from helpers.policies import tiny_config
from megatron_grpo.agents.partners import Partners
from megatron_grpo.config.eval import EvalConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.evaluation.evaluation import (
    SERIES_OF_EVALUATION,
    Evaluated,
    Evaluation,
    as_evaluated,
    due_steps,
    eval_metrics,
    eval_rows,
)
from megatron_grpo.rewards.by_source import RewardsBySource
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

NAN = math.nan


def evaluated(*groups: list[float]) -> Evaluated:
    """Scores of one function for the samples of each prompt, whose first sample is cut off."""
    samples = [
        Sample(
            prompt=Prompt(index=index, token_ids=(5,), text=f"prompt {index}", row={}),
            sample_index=i,
            completion_ids=(4,) * (i + 1),
            logprobs=(-1.0,) * (i + 1),
            finish_reason="stop" if i else "length",
            text=f"completion {i}",
            policy_version=0,
        )
        for index, group in enumerate(groups)
        for i in range(len(group))
    ]
    scores = [score for group in groups for score in group]
    return Evaluated(samples, [{"exact": score} for score in scores], scores)


def test_metrics_are_means_over_prompts() -> None:
    cfg = EvalConfig(num_generations=4, k=(1, 2, 4))
    metrics = eval_metrics(evaluated([1, 0, 0, 0], [1, 1, 0, 0.5]), cfg)
    assert metrics == {
        "eval/pass@1": pytest.approx((1 / 4 + 2 / 4) / 2),
        "eval/pass@2": pytest.approx((3 / 6 + 5 / 6) / 2),
        "eval/pass@4": 1.0,
        "eval/mean@4": pytest.approx((0.25 + 0.625) / 2),
        "eval/reward/exact/mean": pytest.approx(3.5 / 8),
        "eval/completions/mean_length": 2.5,
        "eval/completions/min_length": 1.0,
        "eval/completions/max_length": 4.0,
        "eval/completions/clipped_ratio": 0.25,
        "eval/completions/mean_terminated_length": 3.0,
        "eval/completions/min_terminated_length": 2.0,
        "eval/completions/max_terminated_length": 4.0,
        "eval/failed": 0.0,
        "eval/num_prompts": 2.0,
    }


def test_a_failed_score_is_left_out_and_counted_and_never_a_zero() -> None:
    """The second prompt has one sample left of two, the third none."""
    cfg = EvalConfig(num_generations=2, k=(1, 2))
    metrics = eval_metrics(evaluated([1, 0], [NAN, 1], [NAN, NAN]), cfg)
    assert metrics["eval/failed"] == 3
    assert metrics["eval/pass@1"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/pass@2"] == 1.0  # of the first prompt alone
    assert metrics["eval/mean@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/reward/exact/mean"] == pytest.approx(2 / 3)
    assert metrics["eval/num_prompts"] == 3
    metrics = eval_metrics(evaluated([NAN, NAN]), EvalConfig(num_generations=2))
    assert not any("@" in name or "reward" in name for name in metrics)
    assert all(map(math.isfinite, metrics.values()))


def test_a_row_says_whether_it_passed_and_null_where_nobody_knows() -> None:
    cfg = EvalConfig(num_generations=3, pass_threshold=0.5)
    rows = eval_rows(evaluated([0.5, 0.4, NAN]), cfg)
    assert [row["passed"] for row in rows] == [True, False, None]
    assert [row["reward"] for row in rows] == [0.5, 0.4, None]
    assert rows[2]["rewards"] == {"exact": None}
    # Weights that add up to the threshold but for rounding pass.
    assert eval_metrics(evaluated([0.7 + 0.2 + 0.1]), EvalConfig())["eval/pass@1"] == 1.0
    assert rows[0] == {
        "prompt_index": 0,
        "sample_index": 0,
        "prompt": "prompt 0",
        "completion": "completion 0",
        "rewards": {"exact": 0.5},
        "reward": 0.5,
        "passed": True,
        "finish_reason": "length",
        "columns": {},
    }


def test_an_evaluation_is_due_before_the_first_step_and_after_the_last(tied_model: Path) -> None:
    arguments = ["train.num_steps=5", "eval.interval=2", "eval.data={}"]
    cfg = tiny_config(tied_model, ParallelDims(), *arguments)
    assert due_steps(cfg) == {0, 2, 4, 5}
    assert not due_steps(tiny_config(tied_model, ParallelDims(), "train.num_steps=5"))


def test_what_is_not_given_is_as_in_training(tied_model: Path) -> None:
    def view(*overrides: str):
        return as_evaluated(tiny_config(tied_model, ParallelDims(), "eval.data={}", *overrides))

    rollout = view("rollout.temperature=0.7").rollout
    assert (rollout.temperature, rollout.max_completion_length) == (0.7, 12)
    own = ["eval.temperature=0", "eval.max_completion_length=40", "eval.top_k=3", "eval.top_p=0.9"]
    rollout = view(*own).rollout
    assert (rollout.temperature, rollout.max_completion_length) == (0.0, 40)
    assert (rollout.top_k, rollout.top_p) == (3, 0.9)
    assert [f.name for f in view("eval.reward.functions=[exact]").reward.functions] == ["exact"]


@pytest.fixture(scope="module")
def engine(reference_engine, tied_model):
    reference_engine.push(tied_model)
    return reference_engine


class EvaluationOfEngine:
    """Evaluations of five random prompts by one engine."""

    def __init__(self, engine, *overrides: str) -> None:
        arguments = ["eval.data={}", "eval.num_generations=3", "eval.top_k=50", *overrides]
        self.view = as_evaluated(tiny_config(engine.folder, ParallelDims(), *arguments))
        self.pools = RewardPools()
        rewards = RewardsBySource(self.view.by_source, self.pools)
        self.client = engine.client()
        self.phases: list[str] = []
        self.shown: list[tuple[int, int]] = []
        prompts = [replace(each, row={"number": each.index}) for each in random_prompts(5)]
        self.router = RequestRouter(self.client, str, streams=False)
        partners = Partners(self.view, None, (EOS_ID,), self.client)
        self.evaluation = Evaluation(self.view, prompts, (EOS_ID,), self.router, rewards, partners)

    def run(self, version: int) -> Evaluated:
        timer = PhaseTimer(self.phases.append)
        result = self.evaluation.run(version, timer, lambda *done: self.shown.append(done))
        assert set(timer.metrics()) == {"time/eval", "time/step"}
        return result

    def close(self) -> None:
        self.client.loop.call(self.router.close())
        self.pools.close()


def completions(result: Evaluated) -> list[Sequence[int]]:
    return [sample.completion_ids for sample in result.samples]


def test_samples_do_not_depend_on_how_many_are_asked_for_at_once(engine) -> None:
    with closing(EvaluationOfEngine(engine, "grpo.generation_batch_size=8")) as parts:
        in_parts, again = parts.run(engine.version), parts.run(engine.version)
    assert parts.shown[:4] == [(0, 5), (2, 5), (4, 5), (5, 5)]
    assert parts.phases[:3] == ["eval_generate", "", "eval_score"]
    at_once = engine.generate(
        random_prompts(5),
        num_generations=3,
        max_completion_length=12,
        top_k=50,
        seed=parts.view.train.seed,
        series=SERIES_OF_EVALUATION,
    )
    assert completions(in_parts) == [sample.completion_ids for sample in at_once]
    assert completions(again) == completions(in_parts)
    assert len(in_parts.totals) == len(in_parts.rewards) == 15


def test_scores_that_fail_in_all_parts_stop_an_evaluation_and_in_one_do_not(
    engine, tmp_path
) -> None:
    """Of parts of 6, 6 and 3 completions; half of the 15 may fail, and no part has more."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def one(completions, number, **_): return [1.0 if n else None for n in number]\n"
        "def every(completions, **_): return [None] * len(completions)\n"
    )

    def scored_by(name: str) -> closing[EvaluationOfEngine]:
        options = "grpo.generation_batch_size=8", "reward.max_failed_fraction=0.5"
        functions = f"eval.reward.functions=['{mine}:{name}']"
        return closing(EvaluationOfEngine(engine, *options, functions))

    with scored_by("one") as one:
        metrics = eval_metrics(one.run(engine.version), one.view.eval)
    assert metrics["eval/failed"] == 3
    with (
        scored_by("every") as every,
        pytest.raises(RewardError, match=r"12 of 15 completions .* reward.max_failed_fraction 0.5"),
    ):
        every.run(engine.version)
    assert every.shown[-1] == (2, 5)
