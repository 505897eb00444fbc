"""Groups that are scored while others are generated: which are scored together."""

import asyncio
from threading import Event
from types import SimpleNamespace

import pytest

from helpers.engines.scripted import Scores
from helpers.runs.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.scorer import GroupScorer


class Recorded(Scores):
    """Scores that record the prompts of each call, and wait until they are `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.free = [], Event()

    def __call__(self, samples):
        self.prompts.append([sample.prompt.index for sample in samples[::4]])
        assert self.free.wait(10)
        return super().__call__(samples)


@pytest.fixture
def scorer():
    view = SimpleNamespace(reward=RewardConfig(max_concurrent_calls=2))
    cfg = SimpleNamespace(by_source={"sums": view}, rollout=SimpleNamespace(max_staleness=1))
    scorer = GroupScorer(cfg, None, str)
    scorer.score_now = Recorded()
    return scorer


def group(index):
    return [sample_of("a", {}, index, number) for number in range(4)]


def test_groups_of_the_earliest_generation_are_scored_first_and_a_few_at_a_time(scorer):
    async def run():
        def begin(index, priority):
            return asyncio.create_task(scorer.score(group(index), priority))

        first = begin(2, 5)
        while not scorer.score_now.prompts:
            await asyncio.sleep(0.01)
        others = [begin(3, 5), begin(1, 5), begin(1, 4), begin(0, 4), begin(3, 4)]
        given_up = begin(0, 3)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        scorer.score_now.free.set()
        return await asyncio.gather(first, *others)

    found = asyncio.run(run())
    # Samples of one prompt from two generations are not scored in one call.
    assert scorer.score_now.prompts == [[2], [1, 0], [3, 1], [3]]
    assert [each.samples for each in found] == [group(index) for index in (2, 3, 1, 1, 0, 3)]


def test_after_a_failure_no_other_group_is_scored(scorer):
    async def run():
        scorer.score_now.error = RewardError("by fire")
        scorer.score_now.free.set()
        for index in range(2):
            with pytest.raises(RewardError, match="by fire"):
                await scorer.score(group(index), 0)
            scorer.score_now.error = None

    asyncio.run(run())


def test_scores_that_are_too_few_are_a_failure(scorer):
    scorer.score_now = lambda samples: []
    with pytest.raises(ValueError, match="zip"):
        asyncio.run(scorer.score(group(0), 0))
