"""CONTRIBUTING.md shows a family's file as it is, and its costs of additions hold."""

import ast
import re
from pathlib import Path

import pytest

from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.multimodal import MULTIMODAL

ROOT = Path(__file__).parents[1]
PRODUCT = ("megatron_grpo", "checkpoint_convert", "parallel")
MOST_FILES = {"mamba": 13, "muon": 6}
"""Most files in which code may name a kind of layer, and an optimizer; they may only fall."""


def code(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def test_the_example_equals_the_file_that_it_names():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    name, _, text = block.partition("\n")
    assert text == (ROOT / name.removeprefix("# ")).read_text()


def test_files_of_the_recipes_exist():
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("### To add something")[2]
    folders = ["", "megatron_grpo", "checkpoint_convert", "checkpoint_convert/families"]
    places = [*folders, "tests/megatron_grpo", "megatron_grpo/planning"]
    for name in re.findall(r"`([\w/]+\.(?:py|json|md))`", recipes.partition("## How it is")[0]):
        if name not in ("policy/lion.py", "config.json"):
            assert any((ROOT / place / name).exists() for place in places), name


@pytest.mark.parametrize("name", MOST_FILES)
def test_additions_touch_few_files_of_the_product(name):
    naming = [file for file in code(*PRODUCT) if name in words(ast.parse(file.read_text()))]
    assert len(naming) <= MOST_FILES[name], naming


def words(tree: ast.AST) -> str:
    """Names and strings in the code, in lower case, without docstrings."""
    docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [node for node in ast.walk(tree) if node not in docs]
    names = (
        str(value)
        for node in found
        for field in ("id", "attr", "name", "value", "module", "arg")
        if isinstance(value := getattr(node, field, None), str)
    )
    return " ".join(names).lower()


def test_a_family_is_named_by_its_own_file_and_one_test():
    naming = [file for file in code(*PRODUCT, "tests") if "seed_oss" in file.read_text().lower()]
    others = [file for file in naming if file.parent.name != "families" and file != Path(__file__)]
    assert [file.name for file in others] == ["test_model.py"]


def test_only_files_of_families_name_families():
    families = ROOT / "checkpoint_convert" / "families"
    for file in code(*PRODUCT):
        if file.parent != families:
            nodes = ast.walk(ast.parse(file.read_text()))
            named = {each.value for each in nodes if isinstance(each, ast.Constant)}
            assert not named & {*FAMILIES, *MULTIMODAL}, f"{file}: ask the family's description"
