"""Files that a config names and that are missing."""

import pytest

from helpers.runs import TINY_CONFIG
from megatron_grpo.config.file import load_config
from megatron_grpo.launch.launch import check_files


def test_a_tokenizer_and_the_file_of_an_agent_that_are_missing_are_named(tmp_path):
    given = [f"model.path={tmp_path}", f"data.path={tmp_path}", "data.max_prompt_length=8"]
    cfg = load_config(TINY_CONFIG, [*given, "agent.function=no.py:act"])
    with pytest.raises(ValueError, match="has no tokenizer: none of "):
        check_files(cfg)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(ValueError, match=r"file of an agent no\.py does not exist"):
        check_files(cfg)
