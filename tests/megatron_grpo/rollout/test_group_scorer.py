"""Groups that are scored while others are generated: which are scored together."""

from contextlib import closing
from itertools import chain
from threading import Event

import pytest

from helpers.engines import wait_until
from helpers.rewards import sample_of
from helpers.scripted_engines import Scores
from megatron_grpo.rewards import RewardError
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
    with closing(GroupScorer(None, None, str)) as scorer:
        scorer.score = Recorded()
        yield scorer


def group(index):
    return [sample_of("a", {}, index, number) for number in range(4)]


def test_groups_that_are_complete_are_scored_together_but_those_of_one_prompt(scorer):
    first, second = EarlyScores(scorer), EarlyScores(scorer)
    groups = [group(index) for index in range(3)]
    first.begin(groups[2])
    assert wait_until(lambda: scorer.score.prompts, seconds=10)
    first.begin(groups[1])
    second.begin(group(1))
    second.begin(group(0))
    scorer.score.free.set()
    assert wait_until(lambda: len(scorer.score.prompts) >= 2, seconds=10)
    for each in (second, first):  # what was not begun is now
        assert [found.samples for found in each.of([*chain(*groups)])] == groups
    assert scorer.score.prompts[:2] == [[2], [1, 0]]
    assert sorted(chain(*scorer.score.prompts[2:])) == [0, 1, 2]


def test_after_a_failure_no_other_group_is_scored(scorer):
    scorer.score.error = RewardError("by fire")
    scorer.score.free.set()
    for index in range(2):
        [failed] = scorer.submit([group(index)])
        with pytest.raises(RewardError, match="by fire"):
            failed.result(timeout=10)
        scorer.score.error = None
