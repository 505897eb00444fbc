"""The order of prompts: batches, epochs, mixtures of paths, and prompts that replace others."""

from dataclasses import replace

import pytest

from megatron_grpo.config.data import WeightedPath
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.stream import PromptStream


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index=i, token_ids=(i,), text=str(i), row={}) for i in range(count)]


def batches(stream: PromptStream, count: int) -> list[list[int]]:
    return [[prompt.index for prompt in stream.batch(i)] for i in range(count)]


def test_batch_is_a_function_of_number_and_seed():
    first = batches(PromptStream(prompts(50), 8, seed=1, shuffle=True), 20)
    again = PromptStream(prompts(50), 8, seed=1, shuffle=True)
    assert [prompt.index for prompt in again.batch(19)] == first[19]
    assert batches(PromptStream(prompts(50), 8, seed=2, shuffle=True), 20) != first


def test_epochs_meet_every_prompt_at_most_once():
    epoch_length = 50 // 8
    all_batches = batches(PromptStream(prompts(50), 8, seed=1, shuffle=True), 4 * epoch_length)
    order = [index for batch in all_batches for index in batch]
    epochs = [order[i : i + 48] for i in range(0, 4 * 48, 48)]
    assert all(len(set(epoch)) == len(epoch) == 48 for epoch in epochs)
    assert set().union(*epochs) == set(range(50))
    assert epochs[0] != epochs[1]
    stream = PromptStream(prompts(50), 8, seed=1, shuffle=True)
    assert (stream.epochs(3), stream.epochs(6)) == (0.5, 1)  # two prompts are left out
    assert stream.num_generations(2) == 12


def test_batch_unshuffled_follows_the_rows():
    stream = PromptStream(prompts(5), 3, seed=1, shuffle=False)
    assert batches(stream, 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert stream.epochs(3) == pytest.approx(9 / 5)
    assert (stream.num_generations(1), stream.num_generations(3)) == (2, 5)


THREE_TO_ONE = [WeightedPath(path="many", weight=6), WeightedPath(path="few", weight=2)]
"""Of four prompts in a row, three are of the first path."""


def mixed(many: int, few: int, batch_size: int, *, shuffle: bool = True, **options) -> PromptStream:
    """Prompts 0, 1, ... of the first path, then those of the second."""
    found = [replace(p, path=int(p.index >= many)) for p in prompts(many + few)]
    options = {"seed": 1, "paths": THREE_TO_ONE, **options}
    return PromptStream(found, batch_size, shuffle=shuffle, **options)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [8, 5])
def test_mixture_has_paths_take_turns_by_weight(shuffle, batch_size):
    drawn = batches(mixed(30, 5, batch_size, shuffle=shuffle), 40)
    is_few = [index >= 30 for batch in drawn for index in batch]
    assert is_few == [False, False, True, False] * (10 * batch_size)
    assert all(len(set(batch)) == batch_size for batch in drawn)
    assert {index for batch in drawn for index in batch} == set(range(35))


def test_mixture_has_epochs_and_an_order_of_each_path():
    few = [[i for i in batch if i >= 30] for batch in batches(mixed(30, 6, 8), 6)]
    first, second = ([i for batch in few[start : start + 3] for i in batch] for start in (0, 3))
    assert sorted(first) == sorted(second) == [*range(30, 36)] and first != second
    in_order = [i for batch in batches(mixed(30, 6, 8, shuffle=False), 3) for i in batch]
    assert [i for i in in_order if i >= 30] == [*range(30, 36)]
    assert [i for i in in_order if i < 30] == [*range(18)]
    assert mixed(30, 6, 9).epochs(4) == 1


def test_mixture_is_a_function_of_number_and_seed():
    assert [p.index for p in mixed(30, 5, 5).batch(17)] == batches(mixed(30, 5, 5), 18)[17]
    assert batches(mixed(30, 5, 5, seed=2), 18) != batches(mixed(30, 5, 5), 18)


def test_mixture_refuses_a_path_with_too_few_prompts():
    with pytest.raises(ValueError, match=r"needs 2 different prompts of few .* has 1: .* most 4 "):
        mixed(30, 1, 8)


def test_mixture_of_other_weights_has_another_fingerprint():
    equal = [WeightedPath(path="many", weight=1), WeightedPath(path="few", weight=1)]
    found = {mixed(30, 5, 5, paths=paths).fingerprint for paths in (THREE_TO_ONE, equal)}
    assert len(found | {mixed(29, 6, 5).fingerprint}) == 3


BATCH_SIZE = 8


def stream(num_prompts: int = 40) -> PromptStream:
    return PromptStream(prompts(num_prompts), BATCH_SIZE, seed=1, shuffle=True)


def others(stream: PromptStream, count: int) -> list[int]:
    tried = {prompt.index for prompt in stream.batch(3)}
    found = [prompt.index for prompt in stream.others(tried, count, 3, 1)]
    assert not {*found} & tried and len({*found}) == len(found)
    return found


def test_others_returns_the_requested_number_or_all_left():
    assert len(others(stream(), 5)) == 5
    assert others(stream(), 5) == others(stream(), 5)
    assert len(others(stream(BATCH_SIZE + 3), 8)) == 3


def test_others_of_a_mixture_have_its_proportions():
    """Three prompts of 0 to 29 for one of 30 to 39."""
    found = others(mixed(30, 10, BATCH_SIZE), 16)
    assert (len(found), sum(index >= 30 for index in found)) == (16, 4)
