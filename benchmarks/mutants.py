"""How many faults of one operator the tests of a module alone find, in modules of pure functions.

    make mutants [ARGS="--number 120 --seed 0 --modules parallel/tiles.py megatron_grpo/..."]

Operators of comparison, arithmetic and logic, and the indices 0 and 1, are exchanged one at a time,
in a copy of the checkout: at most so many of them, drawn with the seed. A mutant is killed if the
tests of its module fail, or take four times as long as without it. Prints the survivors: each is a
hole in the tests, or changes nothing that anybody can see.

The tests run in processes forked from this one, which has imported the libraries: that alone takes
longer than most of these tests.
"""

import argparse
import ast
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {
    "checkpoint_convert": {
        "hf_config": "hf_config",
    },
    "megatron_grpo/agents": {
        "actors": "actors",
        "anthropic_api": "chat",
        "chat": "chat",
        "partners": "partners",
        "token_tree": "token_tree",
        "tools": "tools",
        "turns": "turns",
    },
    "megatron_grpo/algorithm": {
        "advantages": "advantages",
        "kl": "kl",
        "loss": "loss",
        "objectives": "objectives loss",
    },
    "megatron_grpo/batch": {
        "branches": "branches",
    },
    "megatron_grpo/config": {
        "checks": "config sources",
        "conflicts": "conflicts",
    },
    "megatron_grpo/data": {
        "encoding": "prompts",
        "messages": "messages",
        "prompts": "prompts",
        "rows": "prompts",
        "samples": "samples",
        "stream": "stream prompts",
    },
    "megatron_grpo/doctor": {
        "gpus": "gpus",
        "host": "host",
        "packages": "packages",
    },
    "megatron_grpo/engine_weights": {
        "layouts": "layouts",
        "protocol": "protocol",
    },
    "megatron_grpo/engines": {
        "access": "access",
        "arguments": "vllm_args sglang_args",
        "choice": "engine request group",
        "client": "router",
        "engine": "engine http",
        "engine_queue": "router engine",
        "group": "group",
        "http": "http",
        "joining": "joining",
        "pool": "joining router",
        "request": "request group",
        "reward_models": "reward_models",
        "router": "router",
        "server": "server",
        "sglang/args": "sglang_args",
        "spec_decode_metrics": "drafts",
        "support": "drafts sglang_args",
        "vllm/args": "vllm_args",
    },
    "megatron_grpo/evaluation": {
        "evaluation": "evaluation",
    },
    "megatron_grpo/launch": {
        "launch": "launch files",
        "placement": "launch",
        "run_dir": "run_dir",
    },
    "megatron_grpo/planning": {
        "job_plan": "command advice",
        "simulation": "simulation",
        "state": "state",
        "step_time": "step_time",
    },
    "megatron_grpo/reporting": {
        "completions": "completions",
        "metrics": "metrics runlog",
        "progress": "progress",
        "report": "report",
        "rows": "rows",
        "runlog": "symptoms runlog",
        "tracking": "tracking",
    },
    "megatron_grpo/rewards": {
        "builtin": "functions",
        "by_source": "by_source references",
        "functions": "functions",
        "judge": "judge",
        "math": "functions references",
        "reward_model": "reward_model",
        "scoring": "scoring reward_model",
    },
    "megatron_grpo/rollout": {
        "generation": "generation runner",
        "group_queue": "group_queue",
        "replay": "replay",
        "runner": "runner resumption",
        "saved_groups": "runner resumption",
        "schedule": "runner resumption",
        "scorer": "scorer runner",
        "services": "services",
    },
    "megatron_grpo/viewer": {
        "server": "server",
    },
    "megatron_grpo/watchdog": {
        "connections": "server",
        "job": "job",
        "stacks": "job",
    },
    "megatron_grpo/workers": {
        "proxies": "proxies",
    },
    "parallel": {
        "alignment": "packing shared_prefix",
        "layout": "layout",
        "logit_tiles": "logprobs",
        "logprobs": "logprobs",
        "packing": "packing",
        "rank_part": "rank_part packing logprobs",
        "reshard": "reshard",
        "sequences": "sequences",
        "shared_prefix": "shared_prefix",
        "sparse_attention": "sparse_attention",
        "tiles": "tiles",
    },
}
"""By folder: modules that need no engine, and the names of their tests in its folder of tests/."""
TESTS = {
    f"{folder}/{module}.py": [f"{folder}/test_{name}.py" for name in names.split()]
    for folder, modules in NAMES.items()
    for module, names in modules.items()
}
"""Modules, and files of tests below tests/."""
EXCHANGED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
EXCHANGED_INDICES = {0: 1, 1: 0}
SLOWER = 4
ENGINES = {"engine", "live_engine", "pair", "reference_engine", "shared_engine"}
"""Fixtures that start one."""
LIBRARIES = ["hypothesis", "megatron.core", "torch", "transformers"]
"""Imported once, for the processes of all tests."""


@dataclass(frozen=True)
class Mutant:
    """One operator or index of a module exchanged."""

    module: str
    line: int
    before: str
    after: str
    source: str
    """Of the whole module."""


def main() -> None:
    """Print what survives, and the share of those killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=[*TESTS], metavar="FILE")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    mutants = [mutant for module in options.modules for mutant in mutants_of(module)]
    number = min(options.number, len(mutants))
    chosen = random.Random(options.seed).sample(mutants, number)
    chosen.sort(key=lambda mutant: (mutant.module, mutant.line))
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder))
        limits = {module: SLOWER * unchanged_seconds(copy, module) for module in options.modules}
        alive = 0
        for number, mutant in enumerate(chosen, 1):
            print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr, flush=True)
            if survives(copy, mutant, limits[mutant.module]):
                alive += 1
                place = f"{mutant.module}:{mutant.line}"
                print(f"\r{place}: {mutant.before} lives as {mutant.after}", flush=True)
    print(f"\r{len(chosen) - alive} of {len(chosen)} killed (seed {options.seed})")


def mutants_of(module: str) -> Iterator[Mutant]:
    """Each operator and index of the module exchanged, but for those in annotations."""
    text = (ROOT / module).read_text(encoding="utf-8")
    for number, place in enumerate(operators(ast.parse(text))):
        tree = ast.parse(text)
        node, index = list(operators(tree))[number]
        before = ast.unparse(node)
        if isinstance(node, ast.Compare):
            node.ops[index] = exchange(node.ops[index])
        elif isinstance(node, ast.Subscript):
            assert isinstance(node.slice, ast.Constant)
            node.slice.value = EXCHANGED_INDICES[node.slice.value]
        else:
            node.op = exchange(node.op)
        yield Mutant(module, place[0].lineno, before, ast.unparse(node), ast.unparse(tree))


def operators(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.AugAssign, int]]:
    """The nodes with an operator or index that can be exchanged, and which of a comparison's it
    is."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from operators(child)
    if isinstance(tree, ast.Compare):
        for index, op in enumerate(tree.ops):
            if type(op) in EXCHANGED:
                yield tree, index
    elif isinstance(tree, ast.BinOp | ast.BoolOp | ast.AugAssign):
        if type(tree.op) in EXCHANGED:
            yield tree, 0
    elif isinstance(tree, ast.Subscript) and is_exchanged(tree.slice):
        yield tree, 0


def is_exchanged(index: ast.expr) -> bool:
    """Whether it is one of EXCHANGED_INDICES."""
    return isinstance(index, ast.Constant) and index.value in EXCHANGED_INDICES


def exchange(operator: ast.AST) -> ast.AST:
    """The operator in its place."""
    return EXCHANGED[type(operator)]()


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, below `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    for name in listed.stdout.split("\0")[:-1]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def unchanged_seconds(copy: Path, module: str) -> float:
    """How long the tests of a module take without a fault, at least a second."""
    start = time.monotonic()
    if code := run_tests(copy, module, 600):
        raise SystemExit(f"the tests of {module} fail without a fault: exit code {code}")
    return max(1.0, time.monotonic() - start)


def survives(copy: Path, mutant: Mutant, limit: float) -> bool:
    """Whether the tests of its module pass with the mutant in place."""
    file = copy / mutant.module
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return run_tests(copy, mutant.module, limit) == 0
    finally:
        file.write_text(original, encoding="utf-8")


def run_tests(copy: Path, module: str, limit: float) -> int:
    """Exit code of pytest, or the negative number of the signal that ended it; -1 after `limit`
    seconds."""
    tests = [f"tests/{name}" for name in TESTS[module]]
    if not (pid := os.fork()):
        try:
            os.setsid()
            run_pytest(copy, tests)
        finally:
            os._exit(1)  # nothing of the parent process happens twice
    end = time.monotonic() + limit
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks would outlive a test that is killed
    if not ended[0]:
        os.waitpid(pid, 0)
        return -1
    return os.waitstatus_to_exitcode(ended[1])


def run_pytest(copy: Path, tests: list[str]) -> None:
    """Run these in the copy, silently, and end this process."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[0] = str(copy)  # before the checkout
    sys.dont_write_bytecode = True
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    os._exit(pytest.main([*options, *tests], plugins=[WithoutEngines()]))


class WithoutEngines:
    """Leaves out tests that start an engine, which takes longer than all others."""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Keep tests whose fixtures start none."""
        items[:] = [item for item in items if not ENGINES & {*item.fixturenames}]


if __name__ == "__main__":
    main()
