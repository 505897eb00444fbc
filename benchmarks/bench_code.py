"""Size of the code, and the part of it that one training step enters.

Prints lines, files, functions and prose of the packages in a checkout (default: this one), the
lines of each room, and the files and functions that each rank enters between two calls of
`train_step` (engines aside), in two runs of configs/tiny_cpu.yaml, one with agents. Any checkout
can be measured, so that a refactor can be compared with its base. The runs take two minutes.
tests/test_ceilings.py holds these figures down.
"""

import ast
import json
import os
import subprocess
import sys
import tokenize
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

PACKAGES = ("megatron_grpo", "checkpoint_convert", "parallel")
AGENT = '''
async def act(client, row):
    """Ask for one turn of plain text."""
    answer = await client.completions.create(model="policy", prompt="1 + 1 =", max_tokens=8)
    return float("2" in answer.choices[0].text)
'''
TRACER = """
import json, os, sys, threading
packages = json.loads(os.environ["TRACED"])
entered, steps = set(), 0
def enter(frame, event, _):
    global steps
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(tuple(packages)):
        return
    if code.co_name == "train_step":
        steps += 1
        if steps == 3:
            with open(os.path.join(os.environ["TRACES"], os.environ.get("RANK", "0")), "w") as file:
                json.dump(sorted(entered), file)
    if steps == 2:
        entered.add((code.co_filename, code.co_qualname))
if "RANK" in os.environ:
    threading.setprofile(enter)
    sys.setprofile(enter)
"""


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=".", type=Path)
    checkout = parser.parse_args().checkout.resolve()
    show_size([file for package in PACKAGES for file in sorted((checkout / package).rglob("*.py"))])
    for room, lines in lines_of_rooms(checkout).items():
        print(f"{lines:7,} lines in {room}")
    for title, has_agents in (("synchronous", False), ("agents", True)):
        by_rank = trace_step(checkout, has_agents=has_agents)
        by_rank["all"] = set().union(*by_rank.values())
        for name, entered in sorted(by_rank.items()):
            num_files = len({file for file, _ in entered})
            print(f"{title}, rank {name}: {num_files} files, {len(entered)} functions in one step")


def lines_of_rooms(checkout: Path) -> dict[str, int]:
    """Lines of Python by room: a folder with its subfolders, or a package's own files. Comments are
    not counted, so that explaining hard code costs nothing."""
    lines: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for file in sorted((checkout / package).rglob("*.py")):
            room = file.relative_to(checkout).parent.parts[:2]
            text = file.read_text(encoding="utf-8").splitlines()
            lines["/".join(room)] += sum(not line.lstrip().startswith("#") for line in text)
    return dict(lines)


def show_size(files: list[Path]) -> None:
    """Lines per file and function, and the shares of docstrings and comments."""
    lines, lengths = [], []
    num_prose: dict[str, int] = defaultdict(int)
    for file in files:
        text = file.read_text(encoding="utf-8")
        lines.append(len(text.splitlines()))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or 0) - node.lineno + 1)
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text and isinstance(node.value.value, str):
                num_prose["docstrings"] += (node.end_lineno or 0) - node.lineno + 1
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                num_prose["comments"] += token.type == tokenize.COMMENT
    print(f"{sum(lines):,} lines in {len(files)} files, {median(lines):.0f} in the median file, ")
    print(f"{max(lines)} in the longest; {len(lengths):,} functions of {mean(lengths):.1f} lines,")
    print(f"{max(lengths)} the longest; lines of docstrings and comments:", end=" ")
    print({name: f"{count / sum(lines):.1%}" for name, count in num_prose.items()})


def trace_step(checkout: Path, *, has_agents: bool = False) -> dict[str, set[tuple[str, str]]]:
    """Files and functions that the second step of a tiny run enters, by rank.

    A step has 16 completions of one turn; with `has_agents`, agents request them.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "traces").mkdir()
        (folder / "sitecustomize.py").write_text(TRACER, encoding="utf-8")
        environ = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{checkout}",
            "TRACES": str(folder / "traces"),
            "TRACED": json.dumps([str(checkout / package) for package in PACKAGES]),
            "OMP_NUM_THREADS": "1",
        }

        tests = checkout / "tests"

        def run(*command: str) -> None:
            subprocess.run([sys.executable, *command], cwd=checkout, env=environ, check=True)

        places = ("helpers/models/tiny.py", "helpers/models.py", "models.py")  # it has moved
        make_model = next(tests / name for name in places if (tests / name).exists())
        run(str(make_model), str(folder / "model"))
        run("-m", "demo.make_sums", str(folder / "sums.jsonl"))
        agents: list[str] = []
        if has_agents:
            (folder / "agent.py").write_text(AGENT, encoding="utf-8")
            agents = [f"agent.function={folder / 'agent.py'}:act", "data.max_prompt_length=64"]
        run(
            *("-m", "megatron_grpo", "train", "configs/tiny_cpu.yaml", "train.num_steps=4"),
            *(f"model.path={folder / 'model'}", f"data.path={folder / 'sums.jsonl'}"),
            *(f"train.run_dir={folder / 'run'}", "parallel.tensor_parallel_size=1", *agents),
        )
        return {
            file.name: {tuple(each) for each in json.loads(file.read_text(encoding="utf-8"))}
            for file in (folder / "traces").iterdir()
        }


if __name__ == "__main__":
    main()
