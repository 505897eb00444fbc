"""Over-sampling with engines and rewards that fail."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from helpers.engines import wait_until
from helpers.images import random_images
from helpers.models import tiny_model
from helpers.scripted_engines import MAX_LENGTH, ScriptedEngine, scripted_services, use
from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.experience_file import OPEN, read_experience, write_experience
from megatron_grpo.checkpoints.trainer_state import (
    Record,
    TrainerState,
    read_record,
    write_record,
)
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.generation import ScoredGroup
from megatron_grpo.rollout.runner import GenerationRunner
from megatron_grpo.rollout.saved_groups import groups_of
from megatron_grpo.rollout.services import RolloutServices
from megatron_grpo.timing import PhaseTimer
from parallel import ParallelDims
from parallel.images import PromptImages

TIMER = PhaseTimer(lambda phase: None)
NUM_SAMPLES, NUM_WANTED = 4, 6
"""Groups at the engines; a generation has 4."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def services(tmp_path: Path, model: Path) -> Iterator[RolloutServices]:
    """Its engines are scripted, and hold their requests; its rewards are `Scores`."""
    option = f"rollout.over_sampling={NUM_WANTED / 4}"
    with scripted_services(model, tmp_path, option) as services:
        yield services


def runner_of(services: RolloutServices, state: TrainerState) -> GenerationRunner:
    timeline = SimpleNamespace(add_rollout=lambda *args, **about: None)
    return GenerationRunner(services, SimpleNamespace(is_preempted=False), timeline, state)


@pytest.fixture
def runner(services: RolloutServices) -> Iterator[GenerationRunner]:
    with closing(runner_of(services, TrainerState(step=0))) as runner:
        runner.resume(0)
        yield runner


def wait_for_requests(services: RolloutServices, count: int) -> None:
    assert wait_until(lambda: len(services.engine.asked) >= count, seconds=30)


@dataclass(frozen=True)
class Images:
    """The images of a prompt; `read` returns them or raises."""

    read: Callable[[], PromptImages]


def with_images(prompts: list[Prompt], read: Callable[[], PromptImages]) -> list[Prompt]:
    """Each with images of its own."""
    return [replace(each, images=Images(lambda: read())) for each in prompts]


def stream_of(prompts: list[Prompt]) -> PromptStream:
    return PromptStream(prompts, batch_size=4, seed=0, shuffle=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="a thread for each core")
def test_images_of_prompts_that_are_asked_for_together_are_read_at_the_same_time(services):
    images = random_images([(4, 4)], [1], 8, torch.Generator())
    two = Barrier(2, timeout=30)

    def read():
        two.wait()  # until another is read, too; else it raises
        return images

    services.stream = stream_of(with_images(services.stream.prompts, read))
    with closing(runner_of(services, TrainerState(step=0))) as runner:
        runner.resume(0)
        wait_for_requests(services, NUM_WANTED * NUM_SAMPLES)


def test_an_unreadable_image_of_a_group_that_replaces_a_rejected_one_is_told(model, tmp_path):
    def read():
        raise OSError("gone")

    options = f"rollout.over_sampling={NUM_WANTED / 4}", "grpo.dynamic_sample=true"
    with scripted_services(model, tmp_path, *options) as services:
        first, others = services.stream.prompts[:NUM_WANTED], services.stream.prompts[NUM_WANTED:]
        services.stream = stream_of([*first, *with_images(others, read)])
        services.score.value = 0.0  # no completion is better than another
        with closing(runner_of(services, TrainerState(step=0))) as runner:
            runner.resume(0)
            services.engine.answers.set()
            assert wait_until(lambda: runner._generations[0].failure, seconds=30)
            with pytest.raises(OSError, match="gone"):
                runner.finish(0, TIMER)


@pytest.mark.parametrize("error", [RewardError("by fire"), KeyError("by fire")])
def test_a_failure_is_told_though_weights_were_pushed_since(runner, services, error):
    services.score.error = error
    services.engine.answers.set()
    assert wait_until(lambda: runner._generations[0].failure, seconds=30)
    runner.abort()
    runner.resume(0)
    with pytest.raises(RolloutAborted if isinstance(error, RewardError) else KeyError):
        runner.finish(0, TIMER)


def test_groups_with_too_few_scores_stay_in_the_checkpoint_with_which_the_run_ends(
    runner, services
):
    services.score.value = math.nan
    services.engine.answers.set()
    with pytest.raises(RolloutAborted, match="have no score"):
        runner.finish(0, TIMER)
    groups, samples, _ = runner.open_groups()
    assert groups.untaken == (*range(NUM_WANTED),)
    assert {*groups_of(samples)} == {*range(NUM_WANTED)}
    assert not any(isinstance(group, ScoredGroup) for group in groups_of(samples).values())


def read_back(folder: Path, runner: GenerationRunner, prompts) -> tuple[TrainerState, Experience]:
    """What a checkpoint of step 1 has of the groups."""
    groups, samples, _ = runner.open_groups()
    record = Record(
        state=TrainerState(step=1, groups=groups), layout=ParallelDims(), counters={}, cursor={}
    )
    write_record(folder, record)
    write_experience(folder, samples, OPEN)
    return read_record(folder, 1).state, read_experience(folder, prompts, OPEN)


def test_a_resumed_run_goes_on_with_whole_and_cut_samples_and_asks_for_none_again(
    runner, services, tmp_path
):
    wait_for_requests(services, NUM_WANTED * NUM_SAMPLES)
    runner.abort()  # each has two tokens
    services.engine.version = 1
    # Two groups are answered, and half of another; the rest goes on without being handed out.
    services.engine.first_held = 2 * NUM_SAMPLES + NUM_SAMPLES // 2
    third = runner._attempts[runner._queue.key_of(2)].group
    runner.resume(1)
    assert wait_until(lambda: services.score.num_scored == 2 * NUM_SAMPLES, seconds=30)
    assert wait_until(lambda: third.num_open == NUM_SAMPLES // 2, seconds=30)
    state, samples = read_back(tmp_path, runner, services.stream.prompts)
    num_whole = sum(sample.finish_reason != CUT for sample in samples.samples)
    assert num_whole == 2 * NUM_SAMPLES + NUM_SAMPLES // 2
    assert len(samples.samples) == NUM_WANTED * NUM_SAMPLES

    runner.close()
    use(services, ScriptedEngine(version=1), "another")
    with closing(runner_of(services, state)) as resumed:
        resumed.restore(state.groups, samples)
        resumed.resume(1)
        wait_for_requests(services, NUM_WANTED * NUM_SAMPLES - num_whole)
        time.sleep(0.1)
        assert len(services.engine.asked) == NUM_WANTED * NUM_SAMPLES - num_whole
        services.engine.answers.set()
        batch = resumed.finish(1, TIMER)
    made = batch.experience.samples
    assert batch.metrics["rollout/num_engines"] == 2  # that of the first run has answered, too
    of_checkpoint = {(each.prompt.index, each.sample_index): each for each in samples.samples}
    assert len(made) == 4 * NUM_SAMPLES
    for sample in made:
        assert sample.spans == ((0, 2), (1, MAX_LENGTH - 2))
        first = len(sample.prompt.token_ids)
        assert [*sample.completion_ids] == [*range(first, first + MAX_LENGTH)]
        part = of_checkpoint.pop((sample.prompt.index, sample.sample_index))
        assert sample.completion_ids[: len(part.completion_ids)] == part.completion_ids
