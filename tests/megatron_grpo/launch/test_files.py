"""Files that a config names and that are missing."""

from pathlib import Path

import pytest

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.launch import check_files


def test_check_files_names_a_tokenizer_and_an_agent(tmp_path):
    given = [f"model.path={tmp_path}", f"data.path={tmp_path}", "data.max_prompt_length=8"]
    cfg = load_config(TINY_CONFIG, [*given, "agent.function=no.py:act"])
    with pytest.raises(ValueError, match="has no tokenizer: none of "):
        check_files(cfg)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(ValueError, match=r"file of an agent no\.py does not exist"):
        check_files(cfg)


def test_check_files_names_all_that_is_missing(tmp_path):
    (table := tmp_path / "rows.csv").write_text("prompt,answer\n")
    given = ["model.path=none", f"data.path={table}", "reward.functions=[my.rewards:right]"]
    cfg = load_config(TINY_CONFIG, [*given, "eval.data.split=test"])
    with pytest.raises(ValueError) as refused:
        check_files(cfg)
    model, data, reward = str(refused.value).splitlines()
    assert model.startswith("model.path ") and "none is not a folder" in model
    assert data.startswith(f"data.path {table} is neither .jsonl nor .parquet")
    assert reward == (
        f"file of reward functions my.rewards does not exist in {Path.cwd()}: "
        "its form is file.py:name"
    )
