"""CONTRIBUTING.md shows a family as it is, and what it says of the cost of adding holds."""

import ast
import re
from pathlib import Path

import pytest

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import MULTIMODAL

ROOT = Path(__file__).parents[1]
PRODUCT = ("megatron_grpo", "checkpoint_convert", "parallel")
MOST_FILES = {
    "seed_oss": 2,  # a family that is a variant of others; three more files are no code
    "mamba": 28,  # a kind of layers: 15 are to be enough
    "muon": 23,  # an optimizer: 8 are to be enough
}
"""In how many files of code, tests included, each may be named: ceilings that may only fall."""


def code(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def test_the_example_is_the_file_that_it_names():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    name, _, text = block.partition("\n")
    assert text == (ROOT / name.removeprefix("# ")).read_text()


@pytest.mark.parametrize("name", MOST_FILES)
def test_what_is_added_is_named_in_few_files(name):
    files = [file for file in code(*PRODUCT, "tests") if file != Path(__file__)]
    naming = [file for file in files if name in file.read_text().lower()]
    assert len(naming) <= MOST_FILES[name], naming


def test_only_files_of_families_name_families():
    families = ROOT / "checkpoint_convert" / "families"
    for file in code(*PRODUCT):
        if file.parent != families:
            nodes = ast.walk(ast.parse(file.read_text()))
            named = {each.value for each in nodes if isinstance(each, ast.Constant)}
            assert not named & {*FAMILIES, *MULTIMODAL}, f"{file}: ask the family's description"
