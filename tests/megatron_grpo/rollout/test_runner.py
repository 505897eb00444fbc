"""Generations in order: lost engines, checkpoints in the middle, and when groups are scored."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.engines import wait_until
from helpers.models import tiny_model
from helpers.scripted_engines import MAX_LENGTH, ScriptedEngine, scripted_services, use
from megatron_grpo.checkpoints.experience_file import OPEN, read_experience, write_experience
from megatron_grpo.checkpoints.trainer_state import OpenGroups, TrainerState
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.runner import PRIORITIES, GenerationRunner
from megatron_grpo.rollout.schedule import RolloutScheduler
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer, is_beside

TIMER = PhaseTimer(lambda phase: None)
SIZE = 16


@pytest.fixture
def services(tmp_path: Path) -> Iterator[RolloutServices]:
    """One that replays the experts of tokens."""
    model = tiny_model(tmp_path / "model", "qwen3_moe")
    with scripted_services(model, tmp_path, "rollout.router_replay=true") as services:
        yield services


def runner_of(services: RolloutServices) -> GenerationRunner:
    timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
    watchdog = SimpleNamespace(is_preempted=False)
    return GenerationRunner(services, watchdog, timeline, TrainerState(step=0))


def num_open(runner: GenerationRunner, generation: int) -> int:
    """Samples of a generation that are not complete."""
    each = runner._attempts.items()
    return sum(attempt.group.num_open for key, attempt in each if key.generation == generation)


def has_open(runner: GenerationRunner, generation: int, count: int) -> bool:
    return num_open(runner, generation) == count


def has_batch(runner: GenerationRunner, generation: int) -> bool:
    return runner._queue.next_generation(generation) is not None


def test_a_resumed_run_goes_on_with_generations_that_were_in_progress(services, tmp_path):
    prompts, engine = services.stream.prompts, services.engine
    runner = runner_of(services)
    runner.resume(0)
    for generation in (0, 1, 2):
        runner.begin(generation, 0)
    assert wait_until(lambda: len(engine.asked) == 3 * SIZE, seconds=30)
    runner.abort()  # each has two tokens
    engine.version = 1
    engine.first_held = PRIORITIES + SIZE // 2  # of generation 1, half is answered
    runner.resume(1)
    assert wait_until(lambda: has_batch(runner, 0), seconds=30)
    assert wait_until(lambda: num_open(runner, 1) == SIZE // 2, seconds=30)
    groups, samples, complete = runner.open_groups()
    assert len(complete[0].experience.samples) == SIZE
    write_experience(tmp_path, samples, OPEN)
    samples = read_experience(tmp_path, prompts, OPEN)
    assert samples.group_ids.tolist() == [place for place in range(4, 12) for _ in range(4)]
    assert sum(sample.finish_reason != CUT for sample in samples.samples) == SIZE // 2
    services.cancel()
    runner.close()

    use(services, ScriptedEngine(version=1), "another")
    services.engine.answers.set()
    with closing(runner_of(services)) as resumed:
        resumed.restore(groups, samples)
        resumed.resume(1)
        for generation in (1, 2):
            resumed.begin(generation, 1)
        made = [resumed.finish(generation, TIMER) for generation in (1, 2)]
    assert len(services.engine.asked) == 2 * SIZE - SIZE // 2
    assert [batch.metrics["rollout/num_engines"] for batch in made] == [2, 1]
    for sample in [sample for batch in made for sample in batch.experience.samples]:
        assert sample.spans == ((0, 2), (1, MAX_LENGTH - 2))
        first = len(sample.prompt.token_ids)
        assert [*sample.completion_ids] == [*range(first, first + MAX_LENGTH)]
        # Of a token that is read, those with which the one behind it was sampled.
        routes = [0] * (first + 1) + [1] * (MAX_LENGTH - 2)
        assert sample.routes.flatten().tolist() == routes


def test_groups_are_scored_while_others_are_at_the_engines(services):
    runner, engine, score = runner_of(services), services.engine, services.score
    engine.first_held = 6  # two samples of the second group have ended
    runner.resume(0)
    for generation in (0, 1):
        runner.begin(generation, 0)
    assert wait_until(lambda: score.num_scored == 4, seconds=10)
    assert wait_until(lambda: num_open(runner, 0) == SIZE - 6, seconds=10)
    engine.first_held = PRIORITIES + 4  # of the next generation the first group has, too
    assert wait_until(lambda: score.num_scored == SIZE + 4, seconds=10)
    engine.answers.set()
    made = [runner.finish(generation, TIMER) for generation in (0, 1)]
    assert score.num_scored == 2 * SIZE
    for generation, batch in enumerate(made):
        samples, prompts = batch.experience.samples, services.stream.batch(generation)
        assert [sample.prompt for sample in samples] == [p for p in prompts for _ in range(4)]
        assert batch.experience.totals.tolist() == [sample.sample_index for sample in samples]
    runner.close()


def test_a_step_that_need_not_wait_for_a_generation_says_that_it_waited_0_seconds(services):
    timer = PhaseTimer(lambda phase: None)
    services.engine.answers.set()
    with closing(runner_of(services)) as runner:
        runner.resume(0)
        runner.begin(0, 0)
        assert wait_until(lambda: has_batch(runner, 0), seconds=30)
        metrics = runner.finish(0, timer).metrics | timer.metrics()
    assert metrics["time/wait_rollout"] < metrics["time/generate"]
    assert is_beside("time/generate", metrics)  # not shown as a part of the step


def test_a_failure_to_score_a_group_ends_the_run_when_its_generation_is_taken(services):
    runner, services.score.error = runner_of(services), RewardError("by fire")
    runner.resume(0)
    runner.begin(0, 0)
    services.engine.answers.set()
    with pytest.raises(RolloutAborted, match="by fire"):
        runner.finish(0, TIMER)


def test_a_checkpoint_right_after_a_push_has_what_was_sampled_before_it(services):
    with closing(runner_of(services)) as runner:
        scheduler = RolloutScheduler(services.cfg, runner, lambda step: None)
        scheduler.after_push(0)
        scheduler.request_ahead(0)
        assert wait_until(lambda: len(services.engine.asked) == 2 * SIZE, seconds=30)
        step = services.cfg.train.save_interval
        scheduler.before_push(step, TIMER)
        services.engine.version = step
        scheduler.after_push(step)
        _, samples, _ = runner.open_groups()
    assert [sample.spans for sample in samples.samples] == [((0, 2),)] * 2 * SIZE


def test_groups_that_were_scored_when_a_run_was_saved_are_not_scored_again(services, tmp_path):
    engine, score = services.engine, services.score
    engine.first_held = 6
    with closing(runner_of(services)) as runner:
        runner.resume(0)
        runner.begin(0, 0)
        assert wait_until(lambda: runner._queue._complete, seconds=10)
        groups, samples, _ = runner.open_groups()
    write_experience(tmp_path, samples, OPEN)
    use(services, ScriptedEngine(version=0), "another")
    services.engine.answers.set()
    with closing(runner_of(services)) as resumed:
        resumed.restore(groups, read_experience(tmp_path, services.stream.prompts, OPEN))
        resumed.resume(0)
        resumed.begin(0, 0)
        totals = resumed.finish(0, TIMER).experience.totals
    assert totals.tolist() == [0, 1, 2, 3] * 4
    assert score.num_scored == SIZE  # by both runs


def test_a_generation_of_which_a_checkpoint_has_all_samples_is_only_scored(services):
    runner = runner_of(services)
    runner.resume(0)
    services.engine.answers.set()
    runner.begin(0, 0)
    whole = runner.finish(0, TIMER).experience
    services.engine.asked.clear()
    resumed = runner_of(services)
    unscored = torch.full_like(whole.totals, torch.nan)
    samples = replace(whole, group_ids=torch.arange(4).repeat_interleave(4), totals=unscored)
    saved = OpenGroups(next_number=4, untaken=(0, 1, 2, 3), engines=((0, ("http://only",)),))
    resumed.restore(saved, samples)
    resumed.resume(0)
    resumed.begin(0, 0)
    assert resumed.finish(0, TIMER).experience.samples == whole.samples
    assert not services.engine.asked


@pytest.fixture
def synchronous(tmp_path: Path) -> Iterator[RolloutServices]:
    model = tiny_model(tmp_path / "model", "qwen3")
    options = "rollout.in_flight_updates=false", "rollout.max_staleness=0"
    with scripted_services(model, tmp_path, *options) as services:
        services.engine.version = 1
        yield services


def test_a_generation_continues_with_the_same_weights_and_begins_anew_with_others(synchronous):
    services, engine, pool = synchronous, synchronous.engine, synchronous.engines.pool
    [url] = services.engines.urls
    with closing(runner_of(services)) as runner:
        left = SIZE
        for version, num_answered in ((1, 5), (1, 3), (2, 4)):
            left = (left if version == 1 else SIZE) - num_answered
            pool.finish_push([url])
            engine.version, engine.broken_route = version, ""
            engine.asked.clear()
            runner.begin(3, version)
            assert wait_until(lambda: len(engine.asked) == num_open(runner, 3), seconds=30)
            engine.first_held = sorted(engine.asked)[num_answered]
            assert wait_until(partial(has_open, runner, 3, left), seconds=30)
            engine.broken_route, engine.first_held = "/health", 0
            with pytest.raises(NoServingEngine):
                runner.finish(3, TIMER)
        pool.finish_push([url])
        engine.broken_route = ""
        engine.answers.set()
        runner.begin(3, 2)
        batch = runner.finish(3, TIMER)
    samples = batch.experience.samples
    assert [sample.policy_version for sample in samples] == [2] * 16
    assert [s.prompt for s in samples[::4]] == services.stream.batch(3)
    assert batch.metrics["rollout/num_engines"] == 1


def test_rounds_replace_groups_of_equal_rewards_by_prompts_that_the_rewards_decide(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    options = (
        "rollout.in_flight_updates=false",
        "rollout.max_staleness=0",
        "grpo.dynamic_sample=true",
        "grpo.max_resample_times=2",
    )
    with scripted_services(model, tmp_path, *options) as services:
        services.engine.answers.set()
        made, equal = [], {prompt.index for prompt in services.stream.batch(0)[:3]}
        services.score.is_equal = lambda index: index in equal
        for _ in range(2):
            with closing(runner_of(services)) as runner:
                runner.begin(0, 0)
                made.append(runner.finish(0, TIMER))
    first, second = ([s.prompt.index for s in batch.experience.samples[::4]] for batch in made)
    assert first == second and len({*first}) == 4 and not {*first} & equal
    assert first[0] == services.stream.batch(0)[3].index
    assert {group.samples[0].prompt.index for group in made[0].replaced} == equal
    assert made[0].metrics["rollout/num_resampled_prompts"] == 3
