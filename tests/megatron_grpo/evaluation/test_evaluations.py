"""Several held-out sets, sampled by a real engine."""

import json
import math

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from demo.make_sums import sums
from helpers.environments import write_environments
from helpers.policies import tiny_config
from megatron_grpo.agents.partners import Partners
from megatron_grpo.data.prompts import end_tokens
from megatron_grpo.engines.http import NoServingEngine
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.evaluation.evaluation import Evaluated, Evaluations, eval_metrics
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims

FEW = "eval.sets.few={data: {}, max_prompts: 3, num_generations: 4}"
MANY = "eval.sets.many={data: {}, max_prompts: 5, top_k: 50}"


@pytest.fixture(scope="module")
def engine(reference_engine, tied_model):
    reference_engine.push(tied_model)
    return reference_engine


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums()[:8]))
    return f"data.path={path}"


class Evaluating:
    """The evaluations of a config by one engine, and what they have shown."""

    def __init__(self, engine, *overrides: str) -> None:
        cfg = self.cfg = tiny_config(
            engine.folder, ParallelDims(), "grpo.generation_batch_size=8", *overrides
        )
        self.client, self.version = engine.client(), engine.version
        self.pools, shape = RewardPools(), read_shape(engine.folder)
        tokenizer = load_tokenizer(engine.folder)
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        self.partners = Partners(cfg, tokenizer, ends, self.client)
        self.router = RequestRouter(self.client, str, streams=False)
        self.evaluations = Evaluations(
            cfg, shape, tokenizer, self.router, self.pools, self.partners
        )
        self.shown: list[tuple[str, int, int]] = []

    def run(self) -> dict[str, Evaluated]:
        timer = PhaseTimer(lambda phase: None)
        return self.evaluations.run(self.version, timer, lambda *done: self.shown.append(done))

    def __enter__(self) -> "Evaluating":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.loop.call(self.router.close())
        self.pools.close()
        self.partners.close()


def completions(result: Evaluated) -> list[tuple[int, ...]]:
    return [tuple(sample.completion_ids) for sample in result.samples]


def test_a_set_gets_the_completions_that_it_gets_alone(engine, data) -> None:
    other = "eval.sets.other={data: {}, max_prompts: 1, reward: {functions: [exact]}}"
    with Evaluating(engine, data, FEW, MANY, other) as three:
        found = three.run()
        few, many, own = (
            each.rewards._pools[""] for each in three.evaluations._evaluations.values()
        )
        assert few is many is not own
    assert three.shown[:5] == [
        *(("few", done, 3) for done in (0, 2, 3)),
        *(("many", done, 5) for done in (0, 5)),
    ]
    assert [len(result.samples) for result in found.values()][:2] == [12, 5]
    with Evaluating(engine, data, MANY) as alone:
        assert completions(found["many"]) == completions(alone.run()["many"])


def test_with_no_engine_left_a_set_that_is_done_is_not_sampled_again(engine, data) -> None:
    with Evaluating(engine, data, FEW, MANY) as whole:
        expected = {name: completions(result) for name, result in whole.run().items()}
    with Evaluating(engine, data, FEW, MANY) as broken:
        [url] = engine.servers.base_urls
        second = broken.evaluations._evaluations["many"]
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
        assert {name: completions(result) for name, result in broken.run().items()} == expected


@pytest.mark.long
def test_dialogues_are_evaluated_with_the_reward_of_their_environment(
    engine, data, tmp_path
) -> None:
    """Turns end at many tokens; the most likely ones make all samples of a prompt the same."""
    game = [
        data,
        f"environment.name={write_environments(tmp_path)}:Echo",
        "environment.arguments={last: 2}",
        f"rollout.stop_token_ids={list(range(20, 60))}",
        "rollout.max_completion_length=100",
        "eval.pass_threshold=1.0",
        "eval.data={}",
        "eval.max_prompts=3",
        "eval.num_generations=2",
    ]
    with Evaluating(engine, *game) as parts:
        [in_parts] = parts.run().values()
        held_out = parts.cfg.eval
    with Evaluating(engine, *game, "grpo.generation_batch_size=4") as smaller:
        assert completions(smaller.run()[""]) == completions(in_parts)
    assert any(len(sample.step_rewards) == 2 for sample in in_parts.samples)
    for sample, scores, total in zip(
        in_parts.samples, in_parts.rewards, in_parts.totals, strict=True
    ):
        assert list(scores) == ["share_of_digits", "environment"]
        assert scores["environment"] == sample.dialogue_reward
        assert total == sum(scores.values())
    metrics = eval_metrics(in_parts, held_out)
    turns = [len(sample.step_rewards) for sample in in_parts.samples]
    assert metrics["eval/num_turns/mean"] == sum(turns) / 6
    assert metrics["eval/environment/failed_ratio"] == 0
    with Evaluating(engine, *game, "eval.top_k=1") as likeliest:
        found = completions(likeliest.run()[""])
    assert found[::2] == found[1::2] != completions(in_parts)[::2]


def test_a_failed_environment_is_no_reward(engine, data, tmp_path) -> None:
    mine = tmp_path / "failing.py"
    mine.write_text(
        "class Failing:\n"
        "    def reset(self, prompt, answer): self.answer = answer\n"
        "    def step(self, text): return '', 1 / (self.answer != '3'), True\n"
    )
    game = [
        data,
        f"environment.name={mine}:Failing",
        "reward.functions=[]",
        "reward.max_failed_fraction=0.5",
        "eval.data={}",
        "eval.max_prompts=2",
        "eval.num_generations=2",
    ]
    with Evaluating(engine, *game) as half:
        [result] = half.run().values()
    assert result.totals == pytest.approx([1, 1, math.nan, math.nan], nan_ok=True)
    metrics = eval_metrics(result, half.cfg.eval)
    assert (metrics["eval/pass@1"], metrics["eval/failed"]) == (1.0, 2)
    with (
        Evaluating(
            engine,
            *game,
            "reward.max_failed_fraction=0.4",
            "eval.data=null",
            "eval.sets.half.data={}",
        ) as too_many,
        pytest.raises(RewardError, match=r"^eval.sets.half: .*2 of 4 completions"),
    ):
        too_many.run()
