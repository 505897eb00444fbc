"""Duplicates agree: the docs' table of keys, the lock file, the shipped configs; style of code."""

import ast
import json
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_grpo.config.config import Config
from megatron_grpo.resume_checks import CHANGEABLE

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]


def key_table() -> str:
    """Every key of the config as a Markdown table: key, default or other values, meaning. A star
    marks keys that a resumed run may change."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name, key in field.annotation.model_fields.items():
            assert key.description, f"{section}.{name} has no docstring"
            meaning = " ".join(key.description.split())
            star = " *" if f"{section}.{name}".startswith(CHANGEABLE) else ""
            rows.append(f"| `{section}.{name}`{star} | {default_of(key)} | {meaning} |")
    return "\n".join(rows)


def default_of(key: FieldInfo) -> str:
    if key.is_required():
        return "required"
    default = "see right" if key.default_factory else f"`{json.dumps(key.default)}`"
    kinds = (key.annotation, *get_args(key.annotation))
    choices = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    others = ", ".join(f"`{json.dumps(each)}`" for each in choices if each != key.default)
    return default + (f" or {others}" if others else "")


def test_the_docs_explain_every_config_key():
    docs = (ROOT / "docs" / "config.md").read_text()
    assert key_table() in docs, f"put this table into docs/config.md:\n{key_table()}"


@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_the_lock_holds_every_dependency_at_an_allowed_version(python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked_extras = ("cpu", "wandb", "tensorboard", "view", "demo", "test", "dev")
    wanted = project["dependencies"] + [line for name in locked_extras for line in extras[name]]
    locked = {
        canonicalize_name(pin.name): pin.specifier for pin in applying(locked_lines(), python)
    }
    for requirement in applying(wanted, python):
        [pin] = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), f"{requirement} is locked at {pin}"


def locked_lines() -> list[str]:
    files = [(ROOT / "requirements" / name).read_text() for name in ("torch.txt", "lock.txt")]
    return [line for text in files for line in text.splitlines() if not line.startswith("#")]


def test_the_page_of_versions_has_the_locked_versions():
    sglang = (ROOT / "requirements" / "sglang.txt").read_text().splitlines()
    on_gpus = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = [*locked_lines(), *on_gpus["optional-dependencies"]["sglang"]]
    locked += [line for line in sglang if line.startswith("sglang==")]
    text = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\| ([^|]+) \|", text, re.MULTILINE)
    assert len(rows) > 5
    for name, versions in rows:
        pins = {
            line.split(" ")[0].partition("==")[2] for line in locked if line.startswith(f"{name}==")
        }
        assert set(re.findall(r"\d+\.\d+\.\d+", versions)) == pins, name


def applying(lines: Iterable[str], python: str) -> list[Requirement]:
    """The requirements that apply to a version of Python."""
    found = [Requirement(line) for line in lines]
    return [r for r in found if not r.marker or r.marker.evaluate({"python_version": python})]


def test_gpus_get_a_transformer_engine_that_this_megatron_core_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours, theirs = (
        accepted_transformer_engines(lines)
        for lines in (project["optional-dependencies"]["gpu"], requires("megatron-core") or [])
    )
    assert ours and ours <= theirs


def accepted_transformer_engines(lines: list[str]) -> set[str]:
    """Releases of Transformer Engine, among a few, that requirements allow for this Python."""
    accepted = {"2.8.0", "2.11.0", "2.12.0", "2.18.0", "2.20.2", "2.21.0"}
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": x}) for x in ("", "dev", "te"))
        if requirement.name == "transformer-engine" and applies:
            accepted &= set(requirement.specifier.filter(accepted))
    return accepted


def test_the_core_that_contributing_lists_stays_small():
    core = (ROOT / "CONTRIBUTING.md").read_text().partition("**The core**")[2].partition("\n\n")[0]
    files = re.findall(r"`([\w/]+\.py)`", core)
    assert len(files) == 14
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) < 3500


def test_files_have_at_most_400_lines_and_functions_at_most_60():
    for file in product_files():
        text = file.read_text()
        assert len(text.splitlines()) <= 400, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{file}: {node.name}"


def product_files() -> Iterable[Path]:
    for package in ("megatron_grpo", "checkpoint_convert", "parallel"):
        yield from (ROOT / package).rglob("*.py")


RIDDLES = re.compile(r"^(That|Those|What|Which|Of|Whose|The same)\b|\b(told|beside)\b")
"""First words of a docstring that replace the field's noun, and two words that hide one."""


def test_docstrings_use_nouns_of_the_field():
    for file in product_files():
        name = str(file.relative_to(ROOT))
        for line, text in docstrings(file):
            assert not RIDDLES.search(text), f"{name}:{line}: {text.splitlines()[0]}"


def docstrings(file: Path) -> Iterable[tuple[int, str]]:
    """(line, text) of docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()
