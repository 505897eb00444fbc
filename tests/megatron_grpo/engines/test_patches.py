"""What our code in the processes of engines replaces, against the source of the installed engines.

Neither is imported: that takes ten seconds. One of these tests fails on the day that an attribute
is gone, or that the engine has mended what a patch is for.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.engines import SGLANG_PYTHON
from megatron_grpo import engines
from megatron_grpo.engines.patches import NONE_FILED

ROOM = Path(engines.__file__).parent
PROJECTS = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}
TEXTS = ("target", "because_of", "why", "upstream")


def patches(engine: str) -> list[dict[str, str]]:
    """The table of an engine: the texts of each patch, and the name of its replacement."""
    tree = ast.parse((ROOM / engine / "patches.py").read_text())
    [table] = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "PATCHES"
    ]
    names = {"NONE_FILED": NONE_FILED}
    return [
        {
            each.arg: names.get(ast.unparse(each.value), getattr(each.value, "value", ""))
            for each in call.keywords
            if each.arg in TEXTS
        }
        for call in table.elts
    ]


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
def test_an_engine_still_has_what_a_patch_replaces_and_the_line_that_it_is_for(engine, patch):
    assert patch["because_of"] in source_of(engine, patch["target"])
    assert patch["why"]


@pytest.mark.parametrize(("engine", "patch"), ALL, ids=[each["target"] for _, each in ALL])
def test_what_is_known_upstream_is_an_issue_or_a_pull_request(engine, patch):
    kinds = [f"https://github.com/{PROJECTS[engine]}/{kind}/" for kind in ("issues", "pull")]
    is_link = any(patch["upstream"].removeprefix(kind).isdecimal() for kind in kinds)
    assert is_link or patch["upstream"] == NONE_FILED


def test_vllm_itself_resets_the_prefix_caches_of_all_groups():
    target = "vllm.v1.engine.core_client:AsyncMPClient.reset_prefix_cache_async"
    assert "all(\n            await self.call_utility_all_async(" in source_of("vllm", target)
