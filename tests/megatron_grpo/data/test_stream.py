"""Prompts that replace others of a generation."""

import random
from dataclasses import replace

from megatron_grpo.config.data import WeightedPath
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.stream import PromptStream

BATCH_SIZE = 8


def stream(num_prompts: int = 40) -> PromptStream:
    prompts = [Prompt(index=i, token_ids=(i,), text="", row={}) for i in range(num_prompts)]
    return PromptStream(prompts, BATCH_SIZE, seed=1, shuffle=True)


def others(prompts: PromptStream, count: int) -> list[int]:
    tried = {prompt.index for prompt in prompts.batch(3)}
    found = [prompt.index for prompt in prompts.others(tried, count, random.Random(0))]
    assert not {*found} & tried and len({*found}) == len(found)
    return found


def test_others_are_as_many_as_are_asked_for_and_the_same_next_time():
    assert len(others(stream(), 5)) == 5
    assert others(stream(), 5) == others(stream(), 5)


def test_data_that_has_no_more_prompts_gives_those_that_are_left():
    assert len(others(stream(BATCH_SIZE + 3), 8)) == 3


def test_others_of_a_mixture_have_its_proportions():
    """Three prompts of 0 to 29 for one of 30 to 39."""
    paths = [WeightedPath(path="a", weight=3), WeightedPath(path="b", weight=1)]
    prompts = [replace(prompt, path=int(prompt.index >= 30)) for prompt in stream().prompts]
    mixture = PromptStream(prompts, BATCH_SIZE, seed=1, shuffle=True, paths=paths)
    found = others(mixture, 16)
    assert (len(found), sum(index >= 30 for index in found)) == (16, 4)
