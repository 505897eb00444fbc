"""Patches of engines, against the source of the installed engines.

Neither is imported: that takes ten seconds. A test fails once an attribute is gone, or once the
engine has mended the fault that a patch is for.
"""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.engines.live import SGLANG_PYTHON
from megatron_grpo import engines

ROOM = Path(engines.__file__).parent
PROJECTS = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}
TEXTS = ("target", "because_of", "why", "upstream")
LINKS = {
    engine: re.compile(rf"https://github\.com/{project}/(issues|pull)/\d+")
    for engine, project in PROJECTS.items()
}


def patches(engine: str) -> list[dict[str, str]]:
    """An engine's patch tables, as source text."""
    tree = ast.parse((ROOM / engine / "patches.py").read_text())
    tables = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).endswith("PATCHES")
    ]
    calls = [call for table in tables for call in table.elts]
    texts = [[each for each in call.keywords if each.arg in TEXTS] for call in calls]
    return [{each.arg: ast.literal_eval(each.value) for each in call} for call in texts]


ALL = [(engine, patch) for engine in PROJECTS for patch in patches(engine)]


def packages(engine: str) -> Path:
    """The folder with the packages of an engine's environment."""
    if engine == "vllm":
        return Path(find_spec("vllm").origin).parents[1]
    if not SGLANG_PYTHON.exists():
        pytest.skip(f"{SGLANG_PYTHON} is made by `make setup-sglang`")
    [folder] = SGLANG_PYTHON.parents[1].glob("lib/python3*/site-packages")
    return folder


def source_of(engine: str, target: str) -> str:
    """The source of `module:attribute`, which must be defined there and not inherited."""
    module, _, path = target.partition(":")
    file = packages(engine).joinpath(*module.split(".")).with_suffix(".py")
    source = file.read_text()
    found: ast.AST = ast.parse(source)
    for name in path.split("."):
        [found] = [each for each in found.body if getattr(each, "name", None) == name]
    return ast.get_source_segment(source, found)


@pytest.mark.parametrize(("engine", "patch"), ALL, ids=[each["target"] for _, each in ALL])
def test_an_engine_still_has_the_patched_attribute_and_the_faulty_line(engine, patch):
    assert patch["because_of"] in source_of(engine, patch["target"])
    assert patch["why"]
    assert "upstream" not in patch or LINKS[engine].fullmatch(patch["upstream"])


def test_vllm_itself_resets_the_prefix_caches_of_all_groups():
    target = "vllm.v1.engine.core_client:AsyncMPClient.reset_prefix_cache_async"
    assert "all(\n            await self.call_utility_all_async(" in source_of("vllm", target)
