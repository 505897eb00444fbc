"""How many faults of one operator in the mathematics the tests of that module alone find.

    make mutants [ARGS="--number 120 --seed 0"]

Operators of comparison, arithmetic and logic are exchanged one at a time, in a copy of the
checkout: so many of them, drawn with the seed. A mutant is killed if the tests of its module fail,
or take four times as long as without it. Prints the survivors: each is a hole in the tests, or
changes nothing that anybody can see.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parents[1]
TESTS = {
    "megatron_grpo/algorithm/advantages.py": ["megatron_grpo/algorithm/test_advantages.py"],
    "megatron_grpo/algorithm/kl.py": ["megatron_grpo/algorithm/test_kl.py"],
    "megatron_grpo/algorithm/loss.py": ["megatron_grpo/algorithm/test_loss.py"],
    "megatron_grpo/algorithm/mismatch.py": ["megatron_grpo/algorithm/test_mismatch.py"],
    "megatron_grpo/algorithm/objectives.py": ["megatron_grpo/algorithm/test_loss.py"],
    "parallel/context.py": ["parallel/test_context.py"],
    "parallel/layout.py": ["parallel/test_layout.py"],
    "parallel/logit_tiles.py": ["parallel/test_logprobs.py"],
    "parallel/logprobs.py": ["parallel/test_logprobs.py"],
    "parallel/packing.py": ["parallel/test_packing.py"],
    "parallel/rank_part.py": ["parallel/test_logprobs.py", "parallel/test_context.py"],
    "parallel/reshard.py": ["parallel/test_reshard.py"],
    "parallel/sequences.py": ["parallel/test_sequences.py"],
    "parallel/shared_prefix.py": ["parallel/test_shared_prefix.py"],
}
"""Modules of mathematics, and their tests below tests/."""
EXCHANGED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
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
SLOWER = 4


@dataclass(frozen=True)
class Mutant:
    """One operator of a module exchanged."""

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
    options = parser.parse_args()
    chosen = random.Random(options.seed).sample(
        [mutant for module in TESTS for mutant in mutants_of(module)], options.number
    )
    chosen.sort(key=lambda mutant: (mutant.module, mutant.line))
    with tempfile.TemporaryDirectory() as name:
        copy = copy_of_checkout(Path(name))
        limits = {module: SLOWER * unchanged_seconds(copy, module) for module in TESTS}
        alive = [each for each in track(chosen) if survives(copy, each, limits[each.module])]
    for mutant in alive:
        print(f"{mutant.module}:{mutant.line}: {mutant.before} lives as {mutant.after}")
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed (seed {options.seed})")


def mutants_of(module: str) -> Iterator[Mutant]:
    """Each operator of the module exchanged, but for those in annotations."""
    text = (ROOT / module).read_text()
    for number, place in enumerate(operators(ast.parse(text))):
        tree = ast.parse(text)
        node, index = list(operators(tree))[number]
        before = ast.unparse(node)
        if isinstance(node, ast.Compare):
            node.ops[index] = exchange(node.ops[index])
        else:
            node.op = exchange(node.op)
        yield Mutant(module, place[0].lineno, before, ast.unparse(node), ast.unparse(tree))


def operators(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.AugAssign, int]]:
    """The nodes with an operator that can be exchanged, and which of a comparison's it is."""
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
    elif isinstance(tree, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(tree.op) in EXCHANGED:
        yield tree, 0


def exchange(operator: ast.AST) -> ast.AST:
    """The operator in its place."""
    return EXCHANGED[type(operator)]()


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, and compiled kernels, below `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kernels = [str(path.relative_to(ROOT)) for path in (ROOT / "parallel").glob("*.so")]
    for name in [*listed.stdout.split("\0")[:-1], *kernels]:
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
    original = file.read_text()
    file.write_text(mutant.source)
    try:
        return run_tests(copy, mutant.module, limit) == 0
    finally:
        file.write_text(original)


def run_tests(copy: Path, module: str, limit: float) -> int:
    """Exit code of pytest; -1 if it took more than `limit` seconds."""
    tests = [f"tests/{name}" for name in TESTS[module]]
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode


if __name__ == "__main__":
    main()
