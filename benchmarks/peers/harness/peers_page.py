"""Writes docs/peers.md from the results of `bench_peers.py`."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

OURS = "ours"
MOST_LOAD, MOST_OTHERS, MOST_SPREAD = 1.5, 0.5, 1.5
COMPARISONS = Path(__file__).parents[1]
RESULTS = COMPARISONS / "results.json"
ROOT = COMPARISONS.parents[1]
PAGE = ROOT / "docs" / "peers.md"
CHANGED = "**Older than the comparison:** its code has changed since, and with it the docstring.\n"

INTRODUCTION = """# Comparison with other projects

`make bench-peers` runs hot paths of this project and of others on the same input, and writes this
page from `benchmarks/peers/results.json`. The docstrings in `benchmarks/peers/` describe each
comparison. Each side runs in a fresh process, and the sides take turns.

- **Factor**: the other side's figure divided by ours in the same round; above 1, ours is better.
  Median, with the least and the largest in brackets. **Goal**: the factor that we aim at.
- **Counts** (bytes, FLOPs, simulated time) are exact and hold on a cluster, too. **Seconds** hold
  for the CPU under each table alone.
- **No number**: the outputs differ; or, for seconds, other processes used more than half a core,
  the load was above 1.5 at the start, or the other side's seconds differ by more than 1.5 times.
- **(rule)**: computed from the other project's documentation, without its code.
"""


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page: one table of factors, then one section for each comparison."""
    parts = [INTRODUCTION, _summary(results)]
    for name, result in sorted(results.items()):
        parts.append(_section(result))
        if result["method"] != method_of(name):
            parts.append(CHANGED)
    return "\n".join(parts)


def method_of(name: str) -> str:
    """A digest of a comparison's file; it differs once the file has changed since the measurement."""
    return sha256((COMPARISONS / f"{name}.py").read_bytes()).hexdigest()[:12]


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| comparison | figure | compared with | factor | goal |", "|---|---|---|---|---|"]
    for _, result in sorted(results.items()):
        title = result["title"]
        for figure, side, goal in result["goals"]:
            others = [each for each in result["figures"] if not each.startswith(OURS)]
            sides = others if side == "best" else [side]
            factors = [found for s in sides if (found := factors_of(result, s, figure))]
            name = f"the best of {len(factors) or len(others)}" if side == "best" else side
            row = f"| {title} | {figure} | {name} |"
            title = ""  # only in the first row of a comparison
            if not factors:
                lines.append(f"{row} no number | {goal:.3g} |")
                continue
            least = min(factors, key=median)
            met = "met" if median(least) >= goal else "**not met**"
            lines.append(f"{row} {spread(least)} | {goal:.3g}: {met} |")
    return "\n".join(lines) + "\n"


def factors_of(result: Mapping[str, Any], side: str, figure: str) -> list[float] | None:
    """The figure of `side` divided by ours in each round; None if no factor may be given."""
    theirs = [found.get(figure) for found in result["figures"][side]]
    ours = [found.get(figure) for found in result["figures"][OURS]]
    if None in theirs or None in ours or 0 in ours:
        return None
    if result["agreement"][side].startswith("differs"):
        return None
    if is_time(figure) and reason_for_silence(result, theirs):
        return None
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def is_time(figure: str) -> bool:
    """Whether the figure depends on this machine and moment."""
    return figure.endswith("seconds")


def reason_for_silence(result: Mapping[str, Any], values: Sequence[float]) -> str | None:
    """Why no factor of these seconds is given; None if it is."""
    if result["load"] > MOST_LOAD:
        return f"load {result['load']:.1f}"
    if result["others"] > MOST_OTHERS:
        return f"other processes took {result['others']:.1f} cores"
    if max(values) > MOST_SPREAD * min(values):
        return f"spread {max(values) / min(values):.1f}x"
    return None


def _section(result: Mapping[str, Any]) -> str:
    figures = {OURS: result["figures"][OURS]} | result["figures"]
    lines = [
        f"## {result['title']}\n",
        f"| | {' | '.join(figures)} |",
        "|---" * (1 + len(figures)) + "|",
    ]
    for figure in figures[OURS][0]:
        cells = [_cell(result, side, figure) for side in figures]
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- {side}: {_notes(result, side)}" for side in figures if side != OURS]
    lines.append(_machine(result))
    return "\n".join(lines)


def _cell(result: Mapping[str, Any], side: str, figure: str) -> str:
    """The figures of a side and its factor."""
    values = [found[figure] for found in result["figures"][side] if figure in found]
    if not values or side == OURS:
        return _figure(values) if values else ""
    return f"{_figure(values)}; **{_factor(result, side, figure, values)}**"


def _factor(result: Mapping[str, Any], side: str, figure: str, values: Sequence[float]) -> str:
    if factors := factors_of(result, side, figure):
        return f"{spread(factors)}x"
    ours = [found[figure] for found in result["figures"][OURS]]
    if result["agreement"][side].startswith("differs"):
        return "no number"
    if 0 in ours:
        return "ours is 0"
    return f"no number: {reason_for_silence(result, values)}"


def _notes(result: Mapping[str, Any], side: str) -> str:
    packages = ", ".join(result["requirements"].get(side, []))
    words = [packages, result["settings"].get(side, ""), result["agreement"][side]]
    return "; ".join(word.rstrip(".") for word in words if word) + "."


def _machine(result: Mapping[str, Any]) -> str:
    ceilings = ", ".join(
        f"{name} {rate:.{0 if rate > 50 else 1}f} {'GFLOP/s' if 'GEMM' in name else 'GB/s'}"
        for name, rate in result["ceilings"].items()
    )
    versions = ", ".join(" ".join(each) for each in result["versions"].items())
    text = (
        f"\n{result['date']}, {result['processor']}, {result['threads']} threads, {versions}. Load "
        f"at the start {result['load']:.2f}; other processes used up to {result['others']:.2f} "
        f"cores. Ceilings: {ceilings}."
    )
    if result["work"]:
        name, amount = result["work"]
        least = amount / 1e9 / result["ceilings"][name]
        text += f" The work takes at least {least:.3g} s at the ceiling of {name}."
    return text + "\n"


def spread(values: Sequence[float]) -> str:
    """Median, least and largest; one number if all are equal."""
    low, middle, high = (f"{each:.3g}" for each in (min(values), median(values), max(values)))
    return middle + ("" if low == high else f" ({low} to {high})")


def _figure(values: Sequence[float]) -> str:
    low, middle, high = (_number(each) for each in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
