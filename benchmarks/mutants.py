"""Mutation testing of modules of pure functions, each by its own tests.

    make mutants [ARGS="--number 120 --seed 0 --by-test --modules parallel/tiles.py ..."]

A mutant exchanges one operator of comparison, arithmetic or logic, or one of the indices 0 and 1,
in a copy of the checkout; `--number` mutants are drawn with `--seed`. A mutant is killed if the
tests of its module fail, or take four times as long as without it. Prints the survivors: each is a
hole in the tests, or an invisible change.

The tests run in processes forked from this one, which imports the libraries that the tests use: the
imports take longer than most of these tests.

`--by-test` runs all tests on each mutant, not only up to the first failure, and prints two counts
for each test: mutants that it kills, and mutants that only it kills. A test with 0 and 0 asserts
nothing about operators, one with 9 and 0 repeats others.
"""

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TESTS = {
    f"{folder}/{module}.py": [f"{folder}/test_{name}.py" for name in names.split()]
    for folder, modules in yaml.safe_load((ROOT / "benchmarks/mutants.yaml").read_text()).items()
    for module, names in modules.items()
}
"""Test files below tests/, by module."""
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
TOO_LATE = "(none: took too long)"
ENGINES = {"engine", "live_engine", "pair", "reference_engine", "shared_engine"}
"""Fixtures that start an engine."""
LIBRARIES = ["hypothesis", "megatron.core", "torch", "transformers"]
"""Libraries to import first; others are imported once the tests of a module have used them."""


@dataclass(frozen=True)
class Mutant:
    """One operator or index of a module exchanged."""

    module: str
    line: int
    before: str
    after: str
    source: str
    """Source of the whole mutated module."""


def main() -> None:
    """Print the surviving mutants and the number of killed ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-test", action="store_true", help="which tests kill how many")
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=[*TESTS], metavar="FILE")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    mutants = [mutant for module in options.modules for mutant in mutants_of(module)]
    chosen = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    chosen.sort(key=lambda mutant: (mutant.module, mutant.line))
    killers = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder))
        limits, tests = {}, set()
        for module in sorted({mutant.module for mutant in chosen}):
            seconds, functions = unchanged(copy, module)
            limits[module] = SLOWER * seconds
            tests |= {*functions}
        for number, mutant in enumerate(chosen, 1):
            print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr, flush=True)
            killers.append(killed_by(copy, mutant, limits[mutant.module], options.by_test))
            if not killers[-1]:
                place = f"{mutant.module}:{mutant.line}"
                print(f"\r{place}: {mutant.before} lives as {mutant.after}", flush=True)
    if options.by_test:
        print_by_test(tests, killers)
    late = sum(TOO_LATE in tests for tests in killers)
    print(
        f"\r{sum(map(bool, killers))} of {len(chosen)} killed, {late} of them by taking too long "
        f"(seed {options.seed})"
    )


def print_by_test(tests: set[str], killers: list[set[str]]) -> None:
    """Per test: mutants that it kills, and mutants that no other test kills."""
    total = Counter(test for tests in killers for test in tests)
    alone = Counter(test for tests in killers if len(tests) == 1 for test in tests)
    for test in sorted(tests | {*total}):
        print(f"\r{total[test]:4} {alone[test]:4} {test}")


def mutants_of(module: str) -> Iterator[Mutant]:
    """A mutant for each operator and index of the module outside of annotations."""
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
    """(node, position among a comparison's operators) of each exchangeable operator or index."""
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
    return isinstance(index, ast.Constant) and index.value in EXCHANGED_INDICES


def exchange(operator: ast.AST) -> ast.AST:
    """The operator that replaces this one."""
    return EXCHANGED[type(operator)]()


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files that git tracks to `folder`."""
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


def unchanged(copy: Path, module: str) -> tuple[float, list[str]]:
    """(seconds, test functions) of a module's tests without a fault; at least one second."""
    for _ in range(2):  # the first imports
        start = time.monotonic()
        ended, report = run_tests(copy, module, 600, every=False)
        if ended:
            raise SystemExit(f"the tests of {module} fail without a fault: exit code {ended}")
        for name in report["libraries"]:
            with suppress(ImportError):  # a fake library that a test has made
                importlib.import_module(name)
    return max(1.0, time.monotonic() - start), report["tests"]


def killed_by(copy: Path, mutant: Mutant, limit: float, every: bool) -> set[str]:
    """Test functions that fail on the mutant: the first, or `every` one; empty if it survives."""
    file = copy / mutant.module
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        ended, report = run_tests(copy, mutant.module, limit, every)
    finally:
        file.write_text(original, encoding="utf-8")
    if report["failed"] or not ended:
        return {*report["failed"]}
    return {TOO_LATE if ended == -1 else "(none: the module or a test cannot be imported)"}


def run_tests(
    copy: Path, module: str, limit: float, every: bool
) -> tuple[int, dict[str, list[str]]]:
    """(exit code of pytest, file of `Report`). The code is the negative number of a signal that
    ended pytest, and -1 after `limit` seconds."""
    tests = [f"tests/{name}" for name in TESTS[module]]
    written = copy / "report.json"
    written.unlink(missing_ok=True)
    if not (pid := os.fork()):
        try:
            os.setsid()
            run_pytest(copy, tests, written, every)
        finally:
            os._exit(1)  # nothing of the parent process happens twice
    end = time.monotonic() + limit
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks would outlive a test that is killed
    code = os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])
    report = json.loads(written.read_text()) if written.exists() else {"failed": []}
    return code if ended[0] else -1, report


def run_pytest(copy: Path, tests: list[str], written: Path, every: bool) -> None:
    """Run `tests` in the copy without output, and end this process."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[0] = str(copy)  # before the checkout
    # Bytecode of a mutant must not outlive it; that of tests, written in the first run, saves time.
    sys.dont_write_bytecode = bool(list((copy / tests[0]).parent.glob("__pycache__/*")))
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not long",
        *([] if every else ["-x"]),
    ]
    os._exit(pytest.main([*options, *tests], plugins=[WithoutEngines(), Report(written)]))


class Report:
    """Writes the test functions that ran, those that failed, and the imported libraries."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the function's name."""
        function = report.nodeid.partition("[")[0]
        self._tests.add(function)
        if report.failed:
            self._failed.add(function)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        folder = sysconfig.get_path("purelib")
        libraries = [
            name
            for name, module in [*sys.modules.items()]
            if str(getattr(module, "__file__", None)).startswith(folder)
        ]
        tests, failed = sorted(self._tests), sorted(self._failed)
        report = {"tests": tests, "failed": failed, "libraries": libraries}
        self._file.write_text(json.dumps(report), encoding="utf-8")


class WithoutEngines:
    """Deselects tests that start an engine, since that takes longer than all others."""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Keep tests without fixtures that start an engine."""
        items[:] = [item for item in items if not ENGINES & {*item.fixturenames}]


if __name__ == "__main__":
    main()
