"""Evaluations: their metrics, and held-out sets that a real engine samples."""

import json
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fractions import Fraction
from itertools import combinations
from math import comb, nan
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from demo.make_sums import sums
from helpers.oracle.policies import tiny_config
from helpers.runs.environments import write_environments
from helpers.runs.rewards import sample_of
from megatron_grpo.agents.partners import Partners
from megatron_grpo.config.eval import EvalConfig
from megatron_grpo.data.prompts import end_tokens
from megatron_grpo.engines.http import NoServingEngine
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.evaluation.evaluation import (
    SERIES_OF_EVALUATION,
    Evaluated,
    Evaluations,
    as_evaluated,
    due_steps,
    eval_metrics,
    eval_rows,
    pass_at_k,
)
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations(range(n), k))  # the first c have passed
            exact = Fraction(sum(any(i < c for i in draw) for draw in draws), len(draws))
            assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-15), (n, c, k)


@pytest.mark.parametrize(("n", "c", "k"), [(2000, 7, 900), (100_000, 3, 1), (100_000, 99_999, 2)])
def test_pass_at_k_of_many_samples_overflows_nothing(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-10)


def evaluated(*groups: list[float]) -> Evaluated:
    """Scores of one function for each prompt's samples; each first sample is cut off."""
    samples = [
        sample_of(
            f"completion {i}",
            {},
            index,
            i,
            completion_ids=(4,) * (i + 1),
            finish_reason="stop" if i else "length",
        )
        for index, group in enumerate(groups)
        for i in range(len(group))
    ]
    scores = [score for group in groups for score in group]
    return Evaluated(samples, [{"exact": score} for score in scores], scores)


def test_eval_metrics_are_means_over_prompts() -> None:
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


def test_eval_metrics_leave_out_a_failed_score_and_count_it() -> None:
    """The second prompt has one sample left of two, the third none."""
    cfg = EvalConfig(num_generations=2, k=(1, 2))
    metrics = eval_metrics(evaluated([1, 0], [nan, 1], [nan, nan]), cfg)
    assert metrics["eval/failed"] == 3
    assert metrics["eval/pass@1"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/pass@2"] == 1.0  # the first prompt alone
    assert metrics["eval/mean@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/reward/exact/mean"] == pytest.approx(2 / 3)
    assert metrics["eval/num_prompts"] == 3
    metrics = eval_metrics(evaluated([nan, nan]), EvalConfig(num_generations=2))
    assert not any("@" in name or "reward" in name for name in metrics)
    assert all(map(math.isfinite, metrics.values()))


def test_eval_rows_say_whether_each_has_passed() -> None:
    cfg = EvalConfig(num_generations=3, pass_threshold=0.5)
    rows = eval_rows(evaluated([0.5, 0.4, nan]), cfg)
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
        "num_tokens": 1,
        "reward": 0.5,
        "rewards": {"exact": 0.5},
        "finish_reason": "length",
        "policy_version": 0,
        "columns": {},
        "passed": True,
    }


def test_due_steps_are_the_first_each_interval_and_the_last(
    tied_model: Path,
) -> None:
    arguments = ["train.num_steps=5", "eval.interval=2", "eval.data={}"]
    cfg = tiny_config(tied_model, ParallelDims(), *arguments)
    assert due_steps(cfg) == {0, 2, 4, 5}
    assert not due_steps(tiny_config(tied_model, ParallelDims(), "train.num_steps=5"))


def test_as_evaluated_takes_missing_keys_from_training(tied_model: Path) -> None:
    def view(*overrides: str):
        return as_evaluated(tiny_config(tied_model, ParallelDims(), "eval.data={}", *overrides))

    rollout = view("rollout.temperature=0.7").rollout
    assert (rollout.temperature, rollout.max_completion_length) == (0.7, 12)
    own = ["eval.temperature=0", "eval.max_completion_length=40", "eval.top_k=3", "eval.top_p=0.9"]
    rollout = view(*own).rollout
    assert (rollout.temperature, rollout.max_completion_length) == (0.0, 40)
    assert (rollout.top_k, rollout.top_p) == (3, 0.9)
    assert [f.name for f in view("eval.reward.functions=[exact]").reward.functions] == ["exact"]


# On an engine, with the first sums: 1 + 1, 1 + 2, ...

ONE_SET = ["eval.data={}", "eval.max_prompts=5", "eval.num_generations=3", "eval.top_k=50"]
FEW = "eval.sets.few={data: {}, max_prompts: 3, num_generations: 4}"
MANY = "eval.sets.many={data: {}, max_prompts: 5, top_k: 50}"


@pytest.fixture(scope="module")
def engine(reference_engine, tied_model):
    reference_engine.push(tied_model)
    return reference_engine


@pytest.fixture(scope="module")
def evaluating(engine, tmp_path_factory):
    """Make the evaluations of a config: `run` them; `shown` has their output."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums()[:8]))

    @contextmanager
    def make(*overrides: str) -> Iterator[SimpleNamespace]:
        options = f"data.path={path}", "grpo.generation_batch_size=8", *overrides
        cfg = tiny_config(engine.folder, ParallelDims(), *options)
        shape, tokenizer = read_shape(engine.folder), load_tokenizer(engine.folder)
        client = engine.client()
        router = RequestRouter(client, str, streams=False)
        made = SimpleNamespace(cfg=cfg, client=client, shown=[], phases=[])
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        with (
            closing(RewardPools()) as pools,
            closing(Partners(cfg, tokenizer, ends, client)) as partners,
        ):
            made.all = Evaluations(cfg, shape, tokenizer, router, pools, partners)

            def run() -> dict[str, Evaluated]:
                made.timer, show = PhaseTimer(made.phases.append), made.shown.append
                return made.all.run(engine.version, made.timer, lambda *done: show(done))

            made.run = run
            try:
                yield made
            finally:
                client.loop.call(router.close())
                client.close()

    return make


def completions(result: Evaluated) -> list[tuple[int, ...]]:
    return [tuple(sample.completion_ids) for sample in result.samples]


def test_run_samples_in_parts_like_all_at_once(engine, evaluating) -> None:
    with evaluating(*ONE_SET) as parts:
        in_parts, again = (parts.run()[""] for _ in range(2))
    assert parts.shown[:4] == [("", 0, 5), ("", 2, 5), ("", 4, 5), ("", 5, 5)]
    assert parts.phases[:3] == ["eval_generate", "", "eval_score"]
    assert parts.timer.metrics().keys() == {"time/eval", "time/step"}
    prompts = [sample.prompt for sample in in_parts.samples[::3]]
    at_once = engine.generate(
        prompts,
        num_generations=3,
        max_completion_length=12,
        top_k=50,
        seed=parts.cfg.train.seed,
        series=SERIES_OF_EVALUATION,
    )
    assert completions(in_parts) == [tuple(sample.completion_ids) for sample in at_once]
    assert completions(again) == completions(in_parts)
    assert len(in_parts.totals) == len(in_parts.rewards) == 15


def test_run_stops_when_scores_of_all_parts_fail(evaluating, tmp_path) -> None:
    """The parts have 6, 6 and 3 completions; 7 of 15 may fail, more than a part has."""
    (mine := tmp_path / "mine.py").write_text(
        "def one(completions, answer, **_): return [None if a == '3' else 1.0 for a in answer]\n"
        "def every(completions, **_): return [None] * len(completions)\n"
    )
    options = [*ONE_SET, "reward.max_failed_fraction=0.5"]
    with evaluating(*options, f"eval.reward.functions=['{mine}:one']") as one:
        assert eval_metrics(one.run()[""], one.cfg.eval)["eval/failed"] == 3
    error = r"12 of 15 completions .* reward.max_failed_fraction 0.5"
    with (
        evaluating(*options, f"eval.reward.functions=['{mine}:every']") as every,
        pytest.raises(RewardError, match=error),
    ):
        every.run()
    assert every.shown[-1] == ("", 2, 5)


def test_run_evaluates_a_set_as_if_it_were_alone(evaluating) -> None:
    other = "eval.sets.other={data: {}, max_prompts: 1, reward: {functions: [exact]}}"
    with evaluating(FEW, MANY, other) as three:
        found = three.run()
        few, many, own = (each.rewards._pools[""] for each in three.all._evaluations.values())
        assert few is many is not own
    assert three.shown[:5] == [
        *(("few", done, 3) for done in (0, 2, 3)),
        *(("many", done, 5) for done in (0, 5)),
    ]
    assert [len(result.samples) for result in found.values()][:2] == [12, 5]
    with evaluating(MANY) as alone:
        assert completions(found["many"]) == completions(alone.run()["many"])


def test_run_after_a_loss_samples_no_set_again(engine, evaluating) -> None:
    with evaluating(FEW, MANY) as broken:
        expected = {name: completions(result) for name, result in broken.run().items()}
        [url] = engine.servers.base_urls
        second = broken.all._evaluations["many"]
        run = second.run

        def lost(*arguments) -> Evaluated:
            broken.client.pool.mark_stale(url, "planted")
            second.run = run
            return run(*arguments)

        second.run = lost
        with pytest.raises(NoServingEngine):
            broken.run()
        broken.client.pool.finish_push([url])
        broken.shown.clear()
        found = broken.run()
        assert {name: completions(result) for name, result in found.items()} == expected
        assert {name for name, *_ in broken.shown} == {"many"}


@pytest.mark.long
def test_run_evaluates_dialogues_by_their_environment(evaluating, tmp_path) -> None:
    """Turns end at many tokens; the most likely ones make all samples of a prompt the same."""
    game = [
        f"environment.name={write_environments(tmp_path)}:Echo",
        "environment.arguments={last: 2}",
        f"rollout.stop_token_ids={list(range(20, 60))}",
        "rollout.max_completion_length=100",
        "eval.pass_threshold=1.0",
        "eval.data={}",
        "eval.max_prompts=3",
        "eval.num_generations=2",
    ]
    with evaluating(*game) as parts:
        [in_parts] = parts.run().values()
    with evaluating(*game, "grpo.generation_batch_size=4") as smaller:
        assert completions(smaller.run()[""]) == completions(in_parts)
    assert any(len(sample.step_rewards) == 2 for sample in in_parts.samples)
    for sample, scores, total in zip(
        in_parts.samples, in_parts.rewards, in_parts.totals, strict=True
    ):
        assert list(scores) == ["share_of_digits", "environment"]
        assert scores["environment"] == sample.dialogue_reward
        assert total == sum(scores.values())
    metrics = eval_metrics(in_parts, parts.cfg.eval)
    turns = [len(sample.step_rewards) for sample in in_parts.samples]
    assert metrics["eval/num_turns/mean"] == sum(turns) / 6
    assert metrics["eval/environment/failed_ratio"] == 0
    with evaluating(*game, "eval.top_k=1") as likeliest:
        found = completions(likeliest.run()[""])
    assert found[::2] == found[1::2] != completions(in_parts)[::2]


def test_run_has_no_reward_of_a_failed_environment(evaluating, tmp_path) -> None:
    (mine := tmp_path / "failing.py").write_text(
        "class Failing:\n"
        "    def reset(self, prompt, answer): self.answer = answer\n"
        "    def step(self, text): return '', 1 / (self.answer != '3'), True\n"
    )
    few = "{data: {}, max_prompts: 2, num_generations: 2}"
    game = [f"environment.name={mine}:Failing", "reward.functions=[]", f"eval.sets.half={few}"]
    with evaluating(*game, "reward.max_failed_fraction=0.5") as half:
        [result] = half.run().values()
    assert result.totals == pytest.approx([1, 1, nan, nan], nan_ok=True)
    with (
        evaluating(*game, "reward.max_failed_fraction=0.4") as too_many,
        pytest.raises(RewardError, match=r"^eval.sets.half: .*2 of 4 completions"),
    ):
        too_many.run()
