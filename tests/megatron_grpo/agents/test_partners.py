"""A generation of several parts, each with its own way to be answered, as one."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from helpers.engines import random_prompts, sampling_params
from helpers.runs import TINY_CONFIG
from megatron_grpo.agents.mixture import MixedDialogues
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.choice import Choice, Logprobs, Token, WeightVersion

CONFIG = load_config(
    TINY_CONFIG, ["sources.column=kind", "sources.by_name={one: {}, two: {}, three: {}}"]
)
ORDER = ["two", "one", "two", "one", "two"]


def answer(token: int) -> Choice:
    return Choice([token], Logprobs([Token(-0.5)]), "stop", "", [WeightVersion("0", 0, 1)])


def test_parts_share_no_number_or_seed_and_their_samples_are_in_the_order_of_the_prompts():
    prompts = [
        replace(prompt, source=name)
        for prompt, name in zip(random_prompts(len(ORDER)), ORDER, strict=True)
    ]
    dialogues = MixedDialogues(CONFIG, lambda view: None, in_flight=None, is_own=False)
    made = dialogues.generation(prompts, sampling_params(first_position=3), CONFIG)
    made.on_group_complete((told := []).append)
    asked = made.open
    assert len(asked) == 2 * len(prompts)
    assert len({request["sampling_params"]["seed"] for request in asked.values()}) == len(asked)
    for number, request in asked.items():
        assert not made.is_complete
        made.add_answer(number, answer(request["token_ids"][0]), "http://engine")
    assert made.is_complete
    assert made.open == {}
    samples = made.samples()
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (index, number) for index in range(len(prompts)) for number in range(2)
    ]
    by_prompt = sorted(told, key=lambda group: group[0].prompt.index)
    assert [sample for group in by_prompt for sample in group] == samples
    # Each has the answer to its own request.
    assert all(s.completion_ids[0] == s.prompt.token_ids[0] for s in samples)


def test_what_was_opened_is_closed_when_the_next_source_cannot_be_opened():
    closed = []

    def opened(view):
        if pools:
            raise ValueError("the address is taken")
        pools.append(Mock(close=lambda: closed.append(view)))
        return pools[0]

    pools = []
    with pytest.raises(ValueError, match="the address is taken"):
        MixedDialogues(CONFIG, opened, in_flight=None, is_own=False)
    assert len(closed) == 1


def test_a_source_that_cannot_begin_is_told_and_all_are_closed_once_by_who_opened_them():
    refusing = Mock(wait_ready=Mock(side_effect=ValueError("it requires 'board'")))
    others = iter([Mock(), refusing, Mock()])
    every = []
    dialogues = MixedDialogues(
        CONFIG, lambda view: every.append(next(others)) or every[-1], in_flight=None, is_own=False
    )
    with pytest.raises(ValueError, match="requires 'board'"):
        dialogues.wait_ready([{"kind": name} for name in ORDER])
    dialogues.close()
    assert [pool.close.call_count for pool in every] == [1, 1, 1]
    every[0].wait_ready.assert_called_once_with([{"kind": "one"}] * 2)
