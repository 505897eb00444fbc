"""Groups that are scored while others are generated: which are scored together."""

from contextlib import closing
from itertools import chain
from threading import Event
from types import SimpleNamespace

import pytest

from helpers.engines import wait_until
from helpers.rewards import sample_of
from helpers.scripted_engines import Scores
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.rollout.group_scorer import EarlyScores, GroupScorer


class Recorded(Scores):
    """Scores that tell the prompts of each call, and wait until they are `free`."""

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
    cfg = SimpleNamespace(by_source={"sums": view})
    with closing(GroupScorer(cfg, None, str)) as scorer:
        scorer.score = Recorded()
        yield scorer


def group(index):
    return [sample_of("a", {}, index, number) for number in range(4)]


def test_groups_of_the_earliest_generation_are_scored_first_and_a_few_at_a_time(scorer):
    later, earlier, abandoned = [EarlyScores(scorer, number) for number in (5, 4, 3)]
    groups = [group(index) for index in range(4)]
    later.begin(groups[2])
    assert wait_until(lambda: scorer.score.prompts, seconds=10)
    later.begin(groups[3], groups[1])
    abandoned.begin(groups[0])
    earlier.begin(group(1))
    earlier.begin(group(0))
    earlier.begin(group(3))
    abandoned.abandon()
    scorer.score.free.set()
    # One prompt of two generations is not scored in one call.
    expected = [[2], [1, 0], [3, 1], [3]]
    assert wait_until(lambda: scorer.score.prompts == expected, seconds=10)
    for each in (earlier, later):  # what was not begun is now
        assert [found.samples for found in each.scored_groups([*chain(*groups)])] == groups
    assert scorer.score.prompts == [*expected, [2], [0]]


def test_after_a_failure_no_other_group_is_scored(scorer):
    scorer.score.error = RewardError("by fire")
    scorer.score.free.set()
    for index in range(2):
        [failed] = scorer.submit([group(index)], order=0)
        with pytest.raises(RewardError, match="by fire"):
            failed.result(timeout=10)
        scorer.score.error = None


def test_scores_that_are_too_few_are_a_failure(scorer):
    scorer.score = lambda samples: []
    [failed] = scorer.submit([group(0)], order=0)
    with pytest.raises(ValueError, match="zip"):
        failed.result(timeout=10)
