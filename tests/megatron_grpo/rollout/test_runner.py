"""Generations in progress that a checkpoint holds."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.engines import wait_until
from helpers.models import tiny_model
from helpers.scripted_engines import MAX_LENGTH, ScriptedEngine, scripted_rollouter, use
from megatron_grpo.checkpoints.experience_file import OPEN, read_experience, write_experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.engines.in_flight import MOST_REQUESTS
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.generate import RolloutRequest
from megatron_grpo.rollout.rollouter import Rollouter
from megatron_grpo.rollout.rollouts import RolloutScheduler
from megatron_grpo.rollout.runner import RolloutRunner
from megatron_grpo.timing import PhaseTimer

TIMER = PhaseTimer(lambda phase: None)
SIZE = 16


@pytest.fixture
def rollouter(tmp_path: Path) -> Iterator[Rollouter]:
    """One that replays the experts of tokens."""
    model = tiny_model(tmp_path / "model", "qwen3_moe")
    with scripted_rollouter(model, tmp_path, "rollout.router_replay=true") as rollouter:
        yield rollouter


def runner_of(rollouter: Rollouter) -> RolloutRunner:
    timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
    return RolloutRunner(rollouter, SimpleNamespace(is_preempted=False), timeline)


def test_a_resumed_run_goes_on_with_generations_that_were_in_progress(rollouter, tmp_path):
    prompts, engine = rollouter.stream.prompts, rollouter.engine
    runner = runner_of(rollouter)
    runner.resume(0)
    for generation in (0, 1, 2):
        runner.begin(RolloutRequest(generation, 0))
    assert wait_until(lambda: len(engine.asked) == 3 * SIZE, seconds=30)
    runner.in_flight.suspend()  # each has two tokens
    engine.version = 1
    engine.first_held = MOST_REQUESTS + SIZE // 2  # of generation 1, half is answered
    runner.resume(1)
    assert wait_until(lambda: runner._rollouts[0].made.done(), seconds=30)
    half = runner._rollouts[1].open
    assert wait_until(lambda: len(half.open) == SIZE // 2, seconds=30)
    groups, samples, complete = runner.open_groups()
    assert len(complete[0].experience.samples) == SIZE
    write_experience(tmp_path, samples, OPEN)
    samples = read_experience(tmp_path, prompts, OPEN)
    assert samples.group_ids.tolist() == [place for place in range(4, 12) for _ in range(4)]
    assert sum(sample.finish_reason != CUT for sample in samples.samples) == SIZE // 2
    rollouter.cancel()
    runner.close()

    use(rollouter, ScriptedEngine(version=1), "another")
    rollouter.engine.answers.set()
    with closing(runner_of(rollouter)) as resumed:
        resumed.restore(groups, samples)
        resumed.resume(1)
        for generation in (1, 2):
            resumed.begin(RolloutRequest(generation, 1))
        made = [resumed.finish(generation, TIMER) for generation in (1, 2)]
    assert len(rollouter.engine.asked) == 2 * SIZE - SIZE // 2
    assert [batch.metrics["rollout/num_engines"] for batch in made] == [2, 1]
    for sample in [sample for batch in made for sample in batch.experience.samples]:
        assert sample.spans == ((0, 2), (1, MAX_LENGTH - 2))
        first = len(sample.prompt.token_ids)
        assert [*sample.completion_ids] == [*range(first, first + MAX_LENGTH)]
        # Of a token that is read, those with which the one behind it was sampled.
        routes = [0] * (first + 1) + [1] * (MAX_LENGTH - 2)
        assert sample.routes.flatten().tolist() == routes


def test_groups_are_scored_while_others_are_at_the_engines(rollouter):
    runner, engine, score = runner_of(rollouter), rollouter.engine, rollouter.score
    engine.first_held = 6  # two samples of the second group have ended
    runner.resume(0)
    for generation in (0, 1):
        runner.begin(RolloutRequest(generation, 0))
    assert wait_until(lambda: score.num_scored == 4, seconds=10)
    assert wait_until(lambda: len(runner._rollouts[0].open.open) == SIZE - 6, seconds=10)
    engine.first_held = MOST_REQUESTS + 4  # of the next generation the first group has, too
    assert wait_until(lambda: score.num_scored == SIZE + 4, seconds=10)
    engine.answers.set()
    made = [runner.finish(generation, TIMER) for generation in (0, 1)]
    assert score.num_scored == 2 * SIZE
    for generation, batch in enumerate(made):
        samples, prompts = batch.experience.samples, rollouter.stream.batch(generation)
        assert [sample.prompt for sample in samples] == [p for p in prompts for _ in range(4)]
        assert batch.experience.totals.tolist() == [sample.sample_index for sample in samples]
    runner.close()


def test_a_failure_to_score_a_group_ends_the_run_when_its_generation_is_taken(rollouter):
    runner, rollouter.score.error = runner_of(rollouter), RewardError("by fire")
    runner.resume(0)
    runner.begin(RolloutRequest(0, 0))
    rollouter.engine.answers.set()
    with pytest.raises(RolloutAborted, match="by fire"):
        runner.finish(0, TIMER)


def test_a_checkpoint_right_after_a_push_has_what_was_sampled_before_it(rollouter):
    with closing(runner_of(rollouter)) as runner:
        scheduler = RolloutScheduler(rollouter.cfg, runner, lambda step: None)
        scheduler.after_push(0)
        scheduler.request_ahead(0)
        assert wait_until(lambda: len(rollouter.engine.asked) == 2 * SIZE, seconds=30)
        step = rollouter.cfg.train.save_interval
        scheduler.before_push(step, TIMER)
        rollouter.engine.version = step
        scheduler.after_push(step)
        _, samples, _ = runner.open_groups()
    assert [sample.spans for sample in samples.samples] == [((0, 2),)] * 2 * SIZE


def test_groups_that_were_scored_when_a_run_was_saved_are_not_scored_again(rollouter, tmp_path):
    engine, score = rollouter.engine, rollouter.score
    engine.first_held = 6
    with closing(runner_of(rollouter)) as runner:
        runner.resume(0)
        runner.begin(RolloutRequest(0, 0))
        assert wait_until(lambda: runner._rollouts[0].early.so_far(), seconds=10)
        groups, samples, _ = runner.open_groups()
    write_experience(tmp_path, samples, OPEN)
    use(rollouter, ScriptedEngine(version=0), "another")
    rollouter.engine.answers.set()
    with closing(runner_of(rollouter)) as resumed:
        resumed.restore(groups, read_experience(tmp_path, rollouter.stream.prompts, OPEN))
        resumed.resume(0)
        resumed.begin(RolloutRequest(0, 0))
        totals = resumed.finish(0, TIMER).experience.totals
    assert totals.tolist() == [0, 1, 2, 3] * 4
    assert score.num_scored == SIZE  # by both runs


def test_a_generation_of_which_a_checkpoint_has_all_samples_is_only_scored(rollouter):
    runner = runner_of(rollouter)
    runner.resume(0)
    rollouter.engine.answers.set()
    runner.begin(RolloutRequest(0, 0))
    whole = runner.finish(0, TIMER).experience
    rollouter.engine.asked.clear()
    resumed = runner_of(rollouter)
    unscored = torch.full_like(whole.totals, torch.nan)
    samples = replace(whole, group_ids=torch.arange(4).repeat_interleave(4), totals=unscored)
    saved = OpenGroups(next_number=4, untaken=(0, 1, 2, 3), engines=((0, ("http://only",)),))
    resumed.restore(saved, samples)
    resumed.begin(RolloutRequest(0, 0))
    assert resumed.finish(0, TIMER).experience.samples == whole.samples
    assert not rollouter.engine.asked
