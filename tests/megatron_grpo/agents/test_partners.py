"""Partners of several sources: each makes the groups of its own rows."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from helpers.engines.live import random_prompts, sampling_params
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.agents import partners as partners_module
from megatron_grpo.agents.partners import Partners
from megatron_grpo.config.file import load_config

ONE = ["sources.column=kind", "sources.by_name.one={environment: {name: 'a.py:A'}}"]
CONFIG = load_config(TINY_CONFIG, [*ONE, "sources.by_name.two={}"])
BOTH = load_config(TINY_CONFIG, [*ONE, "sources.by_name.two={environment: {name: 'b.py:B'}}"])


def opened(monkeypatch, cfg, *pools) -> Partners:
    """Partners with these pools in place of environments."""
    monkeypatch.setattr(partners_module, "Environments", Mock(side_effect=pools))
    return Partners(cfg, None, (), None)


def test_each_source_has_groups_of_its_own_kind(monkeypatch):
    pool, single_turn = Mock(), Mock()
    monkeypatch.setattr(partners_module, "CompletionGroup", single_turn)
    groups = opened(monkeypatch, CONFIG, pool).groups(CONFIG)
    first, second = random_prompts(2)
    group = groups["one"](replace(first, source="one"), sampling_params(), 3, None)
    assert group is pool.groups.return_value.return_value
    new_group = pool.groups.return_value
    assert new_group.call_args.args[1:] == (sampling_params(), 3, None)
    prompt = replace(second, source="two")
    group = groups["two"](prompt, sampling_params(), 5, {"an": "image"})
    assert group is single_turn.return_value
    single_turn.assert_called_once_with(prompt, sampling_params(), 5, {"an": "image"})


def test_opened_pools_are_closed_when_the_next_cannot_be_opened(monkeypatch):
    first = Mock()
    with pytest.raises(ValueError, match="the address is taken"):
        opened(monkeypatch, BOTH, first, ValueError("the address is taken"))
    assert first.close.call_count == 1


def test_a_source_that_cannot_begin_is_named_and_pools_are_closed_once(
    monkeypatch,
):
    refusing = Mock(wait_ready=Mock(side_effect=ValueError("it requires 'board'")))
    first = Mock()
    partners = opened(monkeypatch, BOTH, first, refusing)
    prompts = [replace(p, row={"n": 1}, source="one") for p in random_prompts(2)]
    with pytest.raises(ValueError, match="requires 'board'"):
        partners.wait_ready(prompts)
    partners.close()
    assert first.close.call_count == refusing.close.call_count == 1
    first.wait_ready.assert_called_once_with([{"n": 1}] * 2)
