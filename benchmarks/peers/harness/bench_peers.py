"""Hot paths compared with other projects: `make bench-peers`.

    python benchmarks/peers/harness/bench_peers.py [NAME ...] [--rounds 1] [--threads 2]

Each module of `benchmarks/peers/` is one comparison: see its docstring. Every side runs in a fresh process
with the same number of threads. The order of the sides alternates from round to round, so that
other load on the machine affects all sides alike. There are five rounds, fewer (`ROUNDS`) where all
that is compared is exact or differs little between rounds. A side whose output differs from ours
gets no factors. Counts (bytes, FLOPs, simulated time) are exact and carry over to other machines;
seconds do not, so they are compared only within a round. A factor of seconds is withheld if other
processes took more than half a core during a round, if the load was above 1.5 before the first
round, or if the seconds of a side vary by more than 1.5 times.

The other projects are installed from the package index into .peers/, without their dependencies.
They take Python 3.12 alone; TRL, which is in the project's environment, takes any. Results go to
`benchmarks/peers/results.json`, and from there into docs/peers.md.
"""

import argparse
import importlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from ceilings import measure_ceilings
from peers_page import COMPARISONS, MOST_LOAD, PAGE, RESULTS, ROOT, method_of, render

NAMES = sorted(path.stem for path in COMPARISONS.glob("*.py"))
PYTHON = (3, 12)
"""megatron-bridge, verl and AReaL exclude 3.13."""
TIMEOUT = 1800
"""Seconds that one side may take in one round."""


def main() -> None:
    """Run the named comparisons, and write the page with all stored results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, help="of every side once, for every comparison")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_side(*arguments.run)
        return
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no comparison is called {', '.join(unknown)}: there are {', '.join(NAMES)}")
    names = arguments.names or NAMES
    modules = [importlib.import_module(f"peers.{name}") for name in names]
    installs = any(lines for module in modules for lines in module.REQUIREMENTS.values())
    if installs and sys.version_info[:2] != PYTHON:
        sys.exit(
            f"make bench-peers needs Python 3.12, and this is {platform.python_version()}: the "
            "releases that it compares with (megatron-bridge 0.6.2, verl 0.9.1, areal 1.0.4) take "
            "no other that megatron-core 0.19 takes. "
            "make bench-peers VENV=.venv-3.12 PYTHON=3.12"
        )
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    load = os.getloadavg()[0]
    if load > MOST_LOAD:
        print(f"load {load:.1f}: no factor of seconds will be given, the machine must be idle")
    ceilings = measure_ceilings(arguments.threads)
    for name in names:
        measured = compare_all(name, arguments.rounds, arguments.threads)
        machine = {
            "load": load,
            "threads": arguments.threads,
            "ceilings": ceilings,
        } | this_machine()
        results[name] = machine | measured
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


def this_machine() -> dict[str, Any]:
    """The date, the processor and the versions that all sides of a measurement share."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "date": date.today().isoformat(),
        "processor": f"{os.cpu_count()} x {model or platform.machine()}",
        "versions": {"Python": platform.python_version()}
        | {name: version(name) for name in ("torch", "megatron-core", "transformers")},
    }


def compare_all(name: str, num_rounds: int | None, num_threads: int) -> dict[str, Any]:
    """Run every side of a comparison in every round; compare their outputs in the first."""
    module = importlib.import_module(f"peers.{name}")
    num_rounds = num_rounds or getattr(module, "ROUNDS", 5)
    packages = {side: installed(lines) for side, lines in module.REQUIREMENTS.items()}
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    others: list[float] = []
    agreement: dict[str, str] = {}
    sides = [*module.SIDES]
    for number in range(num_rounds):
        with TemporaryDirectory(prefix="peers-") as folder:
            folders = {side: Path(folder) / side for side in sides}
            for side in sides if number % 2 == 0 else reversed(sides):
                print(f"{name}: {side}, round {number + 1} of {num_rounds}", flush=True)
                found, busy = timed_side(name, side, folders[side], packages.get(side), num_threads)
                figures[side].append(found)
                others.append(busy)
            if number == 0:
                for side in sides[1:]:
                    agreement[side] = agreement_of(module, folders[sides[0]], folders[side])
    return {
        "title": module.TITLE,
        "settings": module.SETTINGS,
        "requirements": module.REQUIREMENTS,
        "goals": module.GOALS,
        "work": getattr(module, "WORK", None),
        "figures": figures,
        "others": max(others),
        "agreement": agreement,
        "method": method_of(name),
    }


def agreement_of(module: Any, ours: Path, peer: Path) -> str:
    """How closely the outputs agree, in words; starts with "differs" if they do not."""
    try:
        return str(module.compare(ours, peer))
    except AssertionError as error:
        return f"differs: {error}"


def installed(requirements: Sequence[str]) -> Path | None:
    """The folder with these packages, which are installed without dependencies if missing."""
    if not requirements:
        return None
    digest = sha256("\n".join(requirements).encode()).hexdigest()[:12]
    folder = ROOT / ".peers" / digest
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(part), *requirements], check=True)
        part.rename(folder)
    return folder


def timed_side(
    name: str, side: str, folder: Path, packages: Path | None, num_threads: int
) -> tuple[dict[str, float], float]:
    """Run a side in a fresh process; returns its figures and the cores used by other processes."""
    folder.mkdir()
    own = [Path(__file__).parent, COMPARISONS.parent, ROOT, ROOT / "tests"]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*own, packages] if packages else own)),
        "OMP_NUM_THREADS": str(num_threads),
        "CUDA_VISIBLE_DEVICES": "",
    }
    before, busy_before = own_cpu_seconds(), busy_cpu_seconds()
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__)), "--run", name, side, str(folder)]
    subprocess.run(command, env=environ, check=True, timeout=TIMEOUT)
    seconds = time.perf_counter() - start
    found = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    own = own_cpu_seconds() - before + found["left_cpu_seconds"]
    others = (busy_cpu_seconds() - busy_before) - own
    return found["figures"], max(0.0, others / seconds)


def run_side(name: str, side: str, folder: str) -> None:
    """In the fresh process: measure, and write the figures to the folder of outputs."""
    figures: Mapping[str, float] = importlib.import_module(f"peers.{name}").SIDES[side](
        Path(folder)
    )
    # The parent counts only processes that were waited for, which a fork server and its children
    # are not.
    left = sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children(recursive=True))
    found = {"figures": figures, "left_cpu_seconds": left}
    (Path(folder) / "figures.json").write_text(json.dumps(found), encoding="utf-8")


def own_cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def busy_cpu_seconds() -> float:
    """CPU seconds of all processes on the machine."""
    fields = [
        int(word)
        for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    ]
    user, nice, system, _, _, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
