"""Generations by scripted engines: losses, failures, checkpoints, and when groups are scored."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from helpers.engines.live import wait_until
from helpers.engines.scripted import MAX_LENGTH, ScriptedEngine, scripted_services, use
from helpers.models.images import random_images
from helpers.models.tiny import tiny_model
from helpers.runs.environments import write_environments
from megatron_grpo.agents.fork_pool import InstancesLost
from megatron_grpo.checkpoints.experience_file import OPEN, read_experience, write_experience
from megatron_grpo.checkpoints.trainer_state import (
    OpenGroups,
    Record,
    TrainerState,
    read_record,
    write_record,
)
from megatron_grpo.config.grpo import GRPOConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.http import NoServingEngine, RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.generation import ScoredGroup
from megatron_grpo.rollout.runner import PRIORITIES, GenerationRunner
from megatron_grpo.rollout.saved_groups import groups_of
from megatron_grpo.rollout.schedule import RolloutScheduler
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer, is_in_background
from parallel import ParallelDims
from parallel.images import PromptImages

TIMER = PhaseTimer(lambda phase: None)
SIZE = 16
"""Completions of a generation: four of each of four prompts."""
OVER_SAMPLED = "rollout.over_sampling=1.5"  # six groups are at the engines
DIALOGUES = (
    "environment.name=demo/environments.py:GuessTheNumber",
    "environment.max_turns=3",
    "data.max_prompt_length=64",
    "reward.functions=[]",
)
SYNCHRONOUS = "rollout.in_flight_updates=false", "rollout.max_staleness=0"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture
def services(model: Path, tmp_path: Path, request) -> Iterator[RolloutServices]:
    """Services with the overrides of the test's parameters."""
    options = getattr(request, "param", ())
    with scripted_services(model, tmp_path, "rollout.router_replay=true", *options) as services:
        yield services


def with_options(*options: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("services", [options], indirect=True)


@contextmanager
def running(
    services: RolloutServices, state: TrainerState | None = None, is_preempted: bool = False
) -> Iterator[GenerationRunner]:
    timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
    watchdog = SimpleNamespace(is_preempted=is_preempted)
    state = state or TrainerState(step=0)
    with closing(GenerationRunner(services, watchdog, timeline, state)) as runner:
        yield runner


def num_open(runner: GenerationRunner, generation: int) -> int:
    """Samples of a generation that are incomplete."""
    each = runner._attempts.items()
    return sum(attempt.group.num_open for key, attempt in each if key.generation == generation)


def has_open(runner: GenerationRunner, generation: int, count: int) -> bool:
    return num_open(runner, generation) == count


def wait_for(condition) -> None:
    assert wait_until(condition, seconds=30)


def read_back(folder: Path, runner: GenerationRunner, services: RolloutServices):
    """State and samples of the groups in a checkpoint of step 1."""
    groups, samples, _ = runner.open_groups()
    state = TrainerState(step=1, groups=groups)
    write_record(folder, Record(state=state, layout=ParallelDims(), counters={}, cursor={}))
    write_experience(folder, samples, OPEN)
    prompts = services.stream.prompts
    return read_record(folder, 1).state, read_experience(folder, prompts, OPEN)


@pytest.mark.parametrize(
    ("services", "begun", "first_held", "num_left", "num_whole", "num_engines"),
    [
        # Of generations 0 to 2 the first is complete, and half of the second is answered.
        ((), (0, 1, 2), PRIORITIES + SIZE // 2, 2 * SIZE, SIZE // 2, [2, 1]),
        # Two and a half of six groups are answered; the rest goes on.
        ((OVER_SAMPLED,), (), 10, 24, 10, [2]),
    ],
    indirect=["services"],
    ids=["in order", "over-sampled"],
)
def test_a_resumed_run_goes_on_with_whole_and_cut_samples_and_asks_for_none_again(
    services, tmp_path, begun, first_held, num_left, num_whole, num_engines
):
    with running(services) as runner:
        runner.resume(0)
        for generation in begun:
            runner.begin(generation, 0)
        num_asked = len(begun) * SIZE or num_left
        wait_for(lambda: len(services.engine.asked) == num_asked)
        runner.abort()  # each has two tokens
        services.engine.version, services.engine.first_held = 1, first_held
        runner.resume(1)
        attempts = [*runner._attempts.values()][-num_left // 4 :]
        wait_for(lambda: sum(each.group.num_open for each in attempts) == num_left - num_whole)
        wait_for(lambda: services.score.num_scored == num_asked - num_left + num_whole // 4 * 4)
        state, samples = read_back(tmp_path, runner, services)
        services.cancel()
    assert len(samples.samples) == num_left
    assert sum(sample.finish_reason != CUT for sample in samples.samples) == num_whole

    use(services, ScriptedEngine(version=1), "another")
    with running(services, state) as resumed:
        resumed.restore(state.groups, samples)
        resumed.resume(1)
        for generation in begun[1:]:
            resumed.begin(generation, 1)
        wait_for(lambda: len(services.engine.asked) == num_left - num_whole)
        time.sleep(0.1)
        assert len(services.engine.asked) == num_left - num_whole
        services.engine.holds = False
        made = [resumed.finish(generation, TIMER) for generation in begun[1:] or (1,)]
    # The first run's engine has answered, too.
    assert [batch.metrics["rollout/num_engines"] for batch in made] == num_engines
    each = [sample for batch in made for sample in batch.experience.samples]
    parts = {(part.prompt.index, part.sample_index): part for part in samples.samples}
    assert len(each) == SIZE * len(made)
    for sample in each:
        part = parts.pop((sample.prompt.index, sample.sample_index))
        assert sample.completion_ids[: len(part.completion_ids)] == part.completion_ids
        assert sample.spans == ((0, 2), (1, MAX_LENGTH - 2))
        first = len(sample.prompt.token_ids)
        assert [*sample.completion_ids] == [*range(first, first + MAX_LENGTH)]
        # A token that was read has the routes with which the next one was sampled.
        routes = [0] * (first + 1) + [1] * (MAX_LENGTH - 2)
        assert sample.routes.flatten().tolist() == routes


@pytest.mark.parametrize(
    ("services", "begun", "first_held"),
    [(DIALOGUES, (1,), PRIORITIES + 10), ((OVER_SAMPLED, *DIALOGUES), (), 10)],
    indirect=["services"],
    ids=["in order", "over-sampled"],
)
def test_a_resumed_run_begins_unfinished_dialogues_anew_and_no_other(
    services, tmp_path, begun, first_held
):
    num_asked = SIZE if begun else 24
    services.engine.first_held = first_held  # two groups and a half are finished
    with running(services) as runner:
        runner.resume(0)
        for generation in begun:
            runner.begin(generation, 0)
        wait_for(lambda: services.score.num_scored == 8)
        wait_for(lambda: sum(len(e.group.so_far()) for e in [*runner._attempts.values()]) == 10)
        state, samples = read_back(tmp_path, runner, services)
        services.cancel()
    assert len(samples.samples) == 10

    use(services, ScriptedEngine(version=1), "another")
    with running(services, state) as resumed:
        resumed.restore(state.groups, samples)
        resumed.resume(1)
        for generation in begun:
            resumed.begin(generation, 1)
        wait_for(lambda: len(services.engine.asked) == num_asked - 10)
        time.sleep(0.1)
        assert len(services.engine.asked) == num_asked - 10
        services.engine.holds = False
        made = resumed.finish(1, TIMER).experience.samples
    finished = {(each.prompt.index, each.sample_index): each for each in samples.samples}
    assert len(made) == SIZE
    for sample in made:
        expected = finished.get((sample.prompt.index, sample.sample_index))
        assert sample.policy_version == (0 if expected else 1)
        assert expected in (None, sample)
        assert len(sample.step_rewards) == 1 and sample.finish_reason == "length"


def test_groups_are_scored_while_others_are_at_the_engines(services):
    engine, score = services.engine, services.score
    engine.first_held = 6  # two samples of the second group have ended
    with running(services) as runner:
        runner.resume(0)
        for generation in (0, 1):
            runner.begin(generation, 0)
        wait_for(lambda: score.num_scored == 4)
        wait_for(lambda: num_open(runner, 0) == SIZE - 6)
        engine.first_held = PRIORITIES + 4  # and the first group of the next generation
        wait_for(lambda: score.num_scored == SIZE + 4)
        engine.holds = False
        made = [runner.finish(generation, TIMER) for generation in (0, 1)]
    assert score.num_scored == 2 * SIZE
    for generation, batch in enumerate(made):
        samples, prompts = batch.experience.samples, services.stream.batch(generation)
        assert [sample.prompt for sample in samples] == [p for p in prompts for _ in range(4)]
        assert batch.experience.totals.tolist() == [sample.sample_index for sample in samples]


def test_finish_of_a_ready_generation_waits_0_seconds(services):
    timer = PhaseTimer(lambda phase: None)
    services.engine.holds = False
    with running(services) as runner:
        runner.resume(0)
        runner.begin(0, 0)
        wait_for(lambda: runner._queue.next_generation(0) is not None)
        metrics = runner.finish(0, timer).metrics | timer.metrics()
    assert metrics["time/wait_rollout"] < metrics["time/generate"]
    assert is_in_background("time/generate", metrics)  # not shown as part of the step


@pytest.mark.parametrize(
    "services",
    [SYNCHRONOUS, ("rollout.in_flight_updates=false", "rollout.max_staleness=1")],
    indirect=True,
    ids=["synchronous", "during the training"],
)
@pytest.mark.parametrize(
    ("error", "is_preempted", "expected"),
    [
        # All ranks save first.
        *((kind, False, RolloutAborted) for kind in (RewardError, TimeoutError, InstancesLost)),
        (NoServingEngine, False, NoServingEngine),
        (KeyError, False, KeyError),  # a mistake of the program
        (InstancesLost, True, Preempted),
    ],
)
def test_finish_raises_the_failure_of_a_generation(services, error, is_preempted, expected):
    services.engine.version = 1
    services.engine.holds = False
    services.score.error = error("by fire")
    prefix = {RolloutAborted: "^generation 3 failed: by fire$", Preempted: None}
    with running(services, TrainerState(step=1), is_preempted) as runner:
        runner.begin(3, policy_version=1)
        with pytest.raises(expected, match=prefix.get(expected, "^'?by fire'?$")):
            runner.finish(3, TIMER)


@with_options(OVER_SAMPLED)
def test_finish_raises_a_failure_though_weights_were_pushed_since(services):
    services.score.error = RewardError("by fire")
    services.engine.holds = False
    with running(services) as runner:
        runner.resume(0)
        wait_for(lambda: runner._generations[0].failure)
        runner.abort()
        runner.resume(0)
        with pytest.raises(RolloutAborted, match="by fire"):
            runner.finish(0, TIMER)


def test_with_over_sampling_failures_of_partners_are_shown_before_the_run_ends(
    model, tmp_path, capsys
):
    fails = f"environment.name={write_environments(tmp_path)}:Together"
    options = *DIALOGUES, fails, "environment.arguments={folder: /nowhere}"
    with scripted_services(model, tmp_path, OVER_SAMPLED, *options) as services:
        services.score.value, services.engine.holds = math.nan, False
        with running(services) as runner:
            runner.resume(0)
            with pytest.raises(RolloutAborted, match="fix the failure shown above"):
                runner.finish(0, TIMER)
    output = capsys.readouterr().err
    assert output.count("the environment failed in ") == 1
    assert ": turn 1: " in output and "FileNotFoundError" in output


@with_options(OVER_SAMPLED)
def test_groups_with_too_few_scores_stay_in_the_checkpoint_with_which_the_run_ends(services):
    services.score.value = math.nan
    services.engine.holds = False
    with running(services) as runner:
        runner.resume(0)
        with pytest.raises(RolloutAborted, match="have no score"):
            runner.finish(0, TIMER)
        groups, samples, _ = runner.open_groups()
    assert groups.untaken == (*range(6),)
    assert {*groups_of(samples)} == {*range(6)}
    assert not any(isinstance(group, ScoredGroup) for group in groups_of(samples).values())


def test_a_checkpoint_right_after_a_push_has_tokens_sampled_before_it(services):
    with running(services) as runner:
        scheduler = RolloutScheduler(services.cfg, runner, lambda step: None)
        scheduler.after_push(0)
        scheduler.request_ahead(0)
        wait_for(lambda: len(services.engine.asked) == 2 * SIZE)
        step = services.cfg.train.save_interval
        scheduler.before_push(step, TIMER)
        services.engine.version = step
        scheduler.after_push(step)
        _, samples, _ = runner.open_groups()
    assert [sample.spans for sample in samples.samples] == [((0, 2),)] * 2 * SIZE


def test_groups_that_were_scored_when_a_run_was_saved_are_not_scored_again(services, tmp_path):
    services.engine.first_held = 6
    with running(services) as runner:
        runner.resume(0)
        runner.begin(0, 0)
        wait_for(lambda: runner._queue._complete)
        state, samples = read_back(tmp_path, runner, services)
    use(services, ScriptedEngine(version=0), "another")
    services.engine.holds = False
    with running(services) as resumed:
        resumed.restore(state.groups, samples)
        resumed.resume(0)
        resumed.begin(0, 0)
        totals = resumed.finish(0, TIMER).experience.totals
    assert totals.tolist() == [0, 1, 2, 3] * 4
    assert services.score.num_scored == SIZE  # by both runs


def test_a_generation_with_all_samples_in_a_checkpoint_is_only_scored(services):
    services.engine.holds = False
    with running(services) as runner:
        runner.resume(0)
        runner.begin(0, 0)
        whole = runner.finish(0, TIMER).experience
    services.engine.asked.clear()
    unscored = torch.full_like(whole.totals, torch.nan)
    samples = replace(whole, group_ids=torch.arange(4).repeat_interleave(4), totals=unscored)
    saved = OpenGroups(next_number=4, untaken=(0, 1, 2, 3), engines=((0, ("http://only",)),))
    with running(services) as resumed:
        resumed.restore(saved, samples)
        resumed.resume(0)
        resumed.begin(0, 0)
        assert resumed.finish(0, TIMER).experience.samples == whole.samples
    assert not services.engine.asked


@with_options(*SYNCHRONOUS)
def test_a_generation_continues_with_the_same_weights_and_begins_anew_with_others(services):
    engine, pool = services.engine, services.engines.pool
    [url] = services.engines.urls
    with running(services) as runner:
        left = SIZE
        for version, num_answered in ((1, 5), (1, 3), (2, 4)):
            left = (left if version == 1 else SIZE) - num_answered
            pool.finish_push([url])
            engine.version, engine.broken_route = version, ""
            engine.asked.clear()
            runner.begin(3, version)
            wait_for(lambda: len(engine.asked) == num_open(runner, 3))
            engine.first_held = sorted(engine.asked)[num_answered]
            wait_for(partial(has_open, runner, 3, left))
            engine.broken_route, engine.first_held = "/health", 0
            with pytest.raises(NoServingEngine):
                runner.finish(3, TIMER)
        pool.finish_push([url])
        engine.broken_route = ""
        engine.holds = False
        runner.begin(3, 2)
        batch = runner.finish(3, TIMER)
    samples = batch.experience.samples
    assert [sample.policy_version for sample in samples] == [2] * SIZE
    assert [s.prompt for s in samples[::4]] == services.stream.batch(3)
    assert batch.metrics["rollout/num_engines"] == 1


@with_options(*SYNCHRONOUS, "grpo.dynamic_sample=true", "grpo.max_resample_times=2")
def test_rounds_replace_groups_of_equal_rewards_by_prompts_that_the_rewards_decide(services):
    services.engine.holds = False
    made, equal = [], {prompt.index for prompt in services.stream.batch(0)[:3]}
    services.score.is_equal = lambda index: index in equal
    for _ in range(2):
        with running(services) as runner:
            runner.begin(0, 0)
            made.append(runner.finish(0, TIMER))
    first, second = ([s.prompt.index for s in batch.experience.samples[::4]] for batch in made)
    assert first == second and len({*first}) == 4 and not {*first} & equal
    assert first[0] == services.stream.batch(0)[3].index
    assert {group.samples[0].prompt.index for group in made[0].replaced} == equal
    assert made[0].metrics["rollout/num_resampled_prompts"] == 3


@with_options(
    *SYNCHRONOUS,
    "grpo.dynamic_sample=true",
    "grpo.max_resample_times=2",
    "grpo.dynamic_sample_temperature=1.5",
)
def test_the_first_round_retries_groups_of_equal_rewards_at_its_own_temperature(services):
    engine = services.engine
    engine.holds = False
    always, at_first, *_ = (prompt.index for prompt in services.stream.batch(0))
    services.score.is_equal = lambda index: (
        index == always or (index == at_first and 1.5 not in engine.temperatures)
    )
    with running(services) as runner:
        runner.begin(0, 0)
        batch = runner.finish(0, TIMER)
    assert engine.temperatures == [1.0] * SIZE + [1.5] * 8 + [1.0] * 4
    taken = {sample.prompt.index: sample.temperature for sample in batch.experience.samples}
    assert taken.pop(at_first) == 1.5 and always not in taken
    assert [*taken.values()] == [None, None, None]
    replaced = [group.samples[0] for group in batch.replaced]
    assert [(sample.prompt.index, sample.temperature) for sample in replaced] == [
        (always, None),
        (at_first, None),
        (always, 1.5),
    ]


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a prompt; `read` returns them or raises."""

    read: Callable[[], PromptImages]


def use_images(services: RolloutServices, read, first: int) -> None:
    """Give each prompt from number `first` on images of its own."""
    prompts = services.stream.prompts
    with_images = [replace(each, images=Images(read)) for each in prompts[first:]]
    each = [*prompts[:first], *with_images]
    services.stream = PromptStream(each, batch_size=4, seed=0, shuffle=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="a thread for each core")
@with_options(OVER_SAMPLED)
def test_images_of_prompts_requested_together_are_read_concurrently(services):
    image = random_images([(4, 4)], [1], 8, torch.Generator())
    two = Barrier(2, timeout=30)

    def read():
        two.wait()  # until another is read, too; else it raises
        return image

    use_images(services, read, first=0)
    with running(services) as runner:
        runner.resume(0)
        wait_for(lambda: len(services.engine.asked) == 24)


@with_options(OVER_SAMPLED, "grpo.dynamic_sample=true")
def test_an_unreadable_image_of_a_replacing_group_is_reported(services):
    def read():
        raise OSError("gone")

    use_images(services, read, first=6)
    services.score.value = 0.0  # no completion is better than another
    services.engine.holds = False
    with running(services) as runner:
        runner.resume(0)
        with pytest.raises(OSError, match="gone"):
            runner.finish(0, TIMER)


def test_finish_for_save_waits_for_nothing_that_a_failed_push_has_suspended():
    rollout = RolloutConfig(
        max_completion_length=8, max_staleness=2, in_flight_updates=True, engine="vllm"
    )
    cfg = SimpleNamespace(
        rollout=rollout,
        grpo=GRPOConfig(num_generations=2, generation_batch_size=4, dynamic_sample=True),
        num_steps=9,
    )
    scheduler = RolloutScheduler(cfg, None, lambda step: None)
    scheduler.after_push(0)
    scheduler.request_ahead(0)
    scheduler.before_push(1, TIMER)  # the push of step 1 fails
    scheduler.finish_for_save(1, TIMER)
    assert [*scheduler.pending] == [1, 2] and not scheduler.ready
