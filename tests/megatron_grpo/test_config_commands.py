"""Commands for configs: a new one, a merged one, and what a key means."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.cli import app
from megatron_grpo.config.explain import explain
from megatron_grpo.config.file import known_keys, load_config


def output_of(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def rows(tmp_path):
    def write(**row: object):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return path

    return write


@pytest.mark.parametrize(
    ("row", "columns", "reward"),
    [
        (
            {"id": 1, "question": "1 + 1?", "answer": "#### 2"},
            ("question", "answer"),
            "math_answer",
        ),
        ({"problem": "Capital?", "solution": "Paris"}, ("problem", "solution"), "exact"),
        (
            {"messages": [{"role": "user", "content": "1?"}], "label": 1},
            ("messages", "label"),
            None,
        ),
    ],
)
def test_a_new_config_names_the_columns_of_the_data_and_loads(
    row, columns, reward, rows, tied_model, tmp_path
):
    path = rows(**row)
    text = output_of("init", "--model", tied_model, "--data", path, "train.num_steps=7")
    assert "  # Peak learning rate, at most 1.\n  lr: 1.0e-06\n" in text
    (tmp_path / "new.yaml").write_text(text)
    cfg = load_config(tmp_path / "new.yaml")
    assert (cfg.model.path, cfg.data.path, cfg.train.num_steps) == (tied_model, str(path), 7)
    assert (cfg.data.prompt_column, cfg.data.answer_column) == columns
    assert reward in (None, cfg.reward.functions[0].name)


def test_a_new_config_needs_columns_that_it_knows_or_that_are_given(rows, tied_model, tmp_path):
    options = ["init", "--model", tied_model, "--data", rows(frage="1 + 1?", antwort="2")]
    with pytest.raises(ValueError, match=r"no column of frage, antwort is .* data\.prompt_column="):
        output_of(*options)
    with pytest.raises(ValueError, match=r"data\.answer_column=NAME, or null, and reward"):
        output_of(*options, "data.prompt_column=frage")
    own = ["data.prompt_column=frage", "data.answer_column=null", "reward.functions=[mine.py:f]"]
    (tmp_path / "new.yaml").write_text(output_of(*options, *own))
    assert load_config(tmp_path / "new.yaml").data.answer_column is None


def test_the_merged_config_is_one_of_the_same_run(tmp_path):
    (tmp_path / "merged.yaml").write_text(output_of("config", TINY_CONFIG, "grpo.beta=0.5"))
    assert load_config(tmp_path / "merged.yaml") == load_config(TINY_CONFIG, ["grpo.beta=0.5"])


def test_a_key_is_explained_with_its_values_relations_and_other_names():
    lines = explain("rollout.max_staleness").split("\n  ")
    assert lines[0] == "rollout.max_staleness: integer at least 0; default 0"
    assert lines[1].startswith("Generations made ahead;")
    assert any(line.startswith("rollout.in_flight_updates needs it") for line in lines)
    assert any("does not go with rollout.enable_sleep_mode: engines that" in line for line in lines)
    assert lines[-1] == "ms-swift: async_generate"
    assert "grpo.kl_horizon: integer above 0; default 10000\n" in explain("kl_horizon")
    assert "lora.init_lora_weights: true or gaussian; default true" in explain("init_lora_weights")
    assert "does nothing without grpo.kl_target" in explain("grpo.kl_horizon")
    assert "optimizer.lr: number above 0; required" in explain("lr")
    assert "grpo.epsilon_high: number above 0; default derived" in explain("grpo.epsilon_high")


def test_a_name_is_explained_by_its_keys_and_its_meaning_in_other_trainers():
    assert [text.partition(":")[0] for text in explain("max_turns").split("\n\n")] == [
        *("environment.max_turns", "agent.max_turns", "max_turns of ms-swift")
    ]
    assert (
        explain("vllm_group_port")
        == "vllm_group_port of TRL: no key: a push finds free ports itself"
    )
    assert "\n  project: Project to log to; null: no logging" in explain("trackio")
    with pytest.raises(ValueError, match=r"grpo.betta is no key: did you mean 'grpo.beta'"):
        explain("grpo.betta")
    for key in known_keys():
        assert explain(key).startswith(f"{key}: ")


def test_these_commands_import_no_torch(rows, tied_model):
    commands = [
        ["init", "--model", str(tied_model), "--data", str(rows(prompt="1 + 1?", answer="2"))],
        ["config", str(TINY_CONFIG)],
        ["explain", "grpo.beta"],
    ]
    code = (
        "import sys; from megatron_grpo.cli import app\n"
        f"for command in {commands!r}: app(command, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--grpo.beta", "keys are given as grpo.beta=VALUE"),
        ("--learning-rate", "here it is optimizer.lr"),
        ("--resume", "the same command resumes the run in train.run_dir"),
    ],
)
def test_a_key_given_as_an_option_is_refused_with_the_way_it_is_given(option, hint):
    result = CliRunner().invoke(app, ["train", str(TINY_CONFIG), option, "0.04"])
    assert result.exit_code == 2
    assert f"No such option: {option}; " in result.output and hint in result.output


def test_shells_complete_keys_with_their_defaults():
    words = f"megatron-grpo train {TINY_CONFIG} grpo.kl_h"
    variables = {"_MEGATRON_GRPO_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    result = CliRunner().invoke(
        app, prog_name="megatron-grpo", env=variables | {"COMP_WORDS": words}
    )
    assert result.output.split() == ["grpo.kl_horizon=10000"]
