"""Several sources of rows in one run: the keys that each inherits, and refusals."""

import pytest

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import dump_config, load_config
from megatron_grpo.evaluation.evaluation import as_evaluated

GAME = "environment: {name: game.py:Game, max_turns: 3}, reward: {functions: []}"
SOURCES = [
    "sources.column=data_source",
    "sources.by_name.math.reward.functions=[exact]",
    f"sources.by_name.game={{{GAME}}}",
    "reward.functions=[]",
    "reward.timeout=7",
    "environment.timeout=3",
]


def load(*overrides: str) -> Config:
    return load_config(TINY_CONFIG, [*SOURCES, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as refused:
        load(*overrides)
    return str(refused.value)


def test_a_source_inherits_the_keys_of_the_run(tmp_path):
    cfg = load()
    math, game = (cfg.by_source[name] for name in ("math", "game"))
    assert [term.label for term in math.reward_terms] == ["exact"]
    assert [term.label for term in game.reward_terms] == ["environment"]
    assert (math.reward.timeout, game.reward.timeout) == (7, 7)
    assert (game.environment.max_turns, game.environment.timeout) == (3, 3)
    assert cfg.has_dialogues and not math.partner
    (tmp_path / "again.yaml").write_text(dump_config(cfg))
    assert load_config(tmp_path / "again.yaml") == cfg


def test_the_name_of_a_source_may_have_dots():
    exact = "{reward: {functions: [exact]}}"
    named = f"sources.by_name={{math.v2: {exact}, math: {exact}}}"
    cfg = load(named, "sources.by_name.math.v2.reward.timeout=5")
    assert [view.reward.timeout for view in cfg.by_source.values()] == [5, 7]


def test_a_held_out_set_is_scored_by_its_own_reward_whatever_the_source():
    held_out = ["eval.data={}", "eval.pass_threshold=0.5"]
    by_source = as_evaluated(load(*held_out)).by_source
    assert [len(view.reward.functions) for view in by_source.values()] == [1, 0]
    own = as_evaluated(load(*held_out, "eval.reward.functions=[math_answer]")).by_source
    assert [view.reward.functions[0].name for view in own.values()] == ["math_answer"] * 2


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("sources.column=null", "sources.column null and sources.by_name (math, game) need each"),
        ("sources.by_name.math.rewards.functions=[exact]", "did you mean 'sources.by_name.math."),
        ("sources.by_name.math.reward.functions=[]", "sources.by_name.math: reward.functions is"),
        ("sources.by_name.a b={}", "sources.by_name has the name 'a b'"),
        ("sources.by_name.game.agent={command: x}", "sources.by_name.game: environment.name=game"),
        (
            "grpo.multi_objective_aggregation=normalize_then_sum",
            "each of sources.by_name has parts of its own",
        ),
        (
            "sources.by_name.math.agent.command=x + data.max_prompt_length=null",
            "sources.by_name.math: agent.command=x needs data.max_prompt_length",
        ),
        ("sources.by_name.math.reward.max_failed_fraction=0.5", "limit of the whole run (0.1)"),
        ("sources.by_name.math.reward.functions=[m.py:environment]", "called environment, the"),
    ],
)
def test_an_invalid_source_is_refused_by_name(override, error):
    assert error in refusal(*override.split(" + "))


@pytest.mark.parametrize(
    "inherited", [[], ["agent.listen=127.0.0.1:0", "sources.by_name={math: {}, other: {}}"]]
)
def test_two_sources_that_listen_at_addresses_are_refused(inherited):
    listening = [f"sources.by_name.{name}.agent.listen=127.0.0.1:0" for name in ("math", "other")]
    assert "by_name.math and other both have agent.listen" in refusal(
        *(inherited or listening), "data.max_prompt_length=50"
    )
