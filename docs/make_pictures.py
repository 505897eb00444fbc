"""Draws the pictures of README and docs/internals.md: architecture.svg, push.svg and step.svg.

    PYTHONPATH=.:tests python docs/make_pictures.py [RUN_DIR]

step.svg is from the timeline.json of a run, such as

    python tests/helpers/models/tiny.py models/tiny_qwen3
    python -m demo.make_sums data/sums.jsonl
    OMP_NUM_THREADS=1 megatron-grpo train configs/tiny_cpu.yaml data.path=data/sums.jsonl \\
        train.num_steps=8 rollout.max_staleness=1 grpo.old_logprobs=rollout train.run_dir=RUN_DIR

and stays as it is without RUN_DIR. Colours follow the reader's choice of light or dark.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from checkpoint_convert import read_shape
from checkpoint_convert.megatron import first_senders
from helpers.models.published import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.engine_weights.layouts import worker_layouts
from parallel import Box, ParallelDims, all_shares

FOLDER = Path(__file__).parent
INK = "#123456"
"""Placeholder for the colour of text, which the picture's style sheet chooses."""
STYLE = """<style>
svg { --ink: #1f2328 }
@media (prefers-color-scheme: dark) { svg { --ink: #d9dfe6 } }
</style>"""
BLUE, GREEN, ORANGE, RED = "#4c78a8", "#54a24b", "#f58518", "#e45756"
RANKS = (BLUE, GREEN, ORANGE, RED)


def main() -> None:
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "", "text.color": INK, "font.size": 11}
    )
    save(architecture(), "architecture.svg")
    save(push(), "push.svg")
    if sys.argv[1:]:
        save(step(Path(sys.argv[1])), "step.svg")


def save(figure: Figure, name: str) -> None:
    """Write the figure, with a style sheet instead of fixed ink."""
    file = FOLDER / name
    figure.savefig(file, bbox_inches="tight", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = file.read_text(encoding="utf-8").replace(INK, "var(--ink)")
    head, tag, rest = text.partition("<defs>")
    file.write_text(f"{head}{STYLE}\n {tag}{rest}", encoding="utf-8")


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes without frames, in inches."""
    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, place: tuple[float, float], size: tuple[float, float], color: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(
            place, *size, boxstyle=style, facecolor="none", edgecolor=color, linewidth=1.8
        )
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=color, linewidth=1.8)
    )


NODES = (
    ("rank 0", "one event loop:\nprompts, groups, requests", (0.1, 2.6), BLUE),
    ("trainer ranks", "Megatron-Core by torchrun\nTP · SP · PP · CP · EP · DP", (0.1, 0.2), BLUE),
    (
        "rewards, agents",
        "environments, tools:\nprocesses of their own",
        (7.3, 2.6),
        ORANGE,
    ),
    ("engines", "vLLM or SGLang\nworkers: TP · EP · DP", (7.3, 0.2), GREEN),
)
FLOWS = (
    ((3.2, 3.7), (7.3, 3.7), "completions", (5.25, 3.85), INK),
    ((7.3, 3.3), (3.2, 3.3), "scores, answers", (5.25, 3.15), INK),
    ((3.2, 2.75), (7.3, 1.6), "prompts", (6.75, 2.0), INK),
    ((7.3, 1.3), (3.2, 2.45), "tokens and log-probabilities", (4.2, 1.7), INK),
    ((3.2, 0.75), (7.3, 0.75), "weight shards, verified by checksums", (5.25, 0.9), BLUE),
    ((3.2, 0.75), (7.3, 0.75), "CUDA IPC · shared memory · NCCL · TCP", (5.25, 0.55), BLUE),
    ((1.1, 2.6), (1.1, 1.6), "experience", (0.55, 2.1), BLUE),
    ((2.2, 1.6), (2.2, 2.6), "metrics", (2.6, 2.1), BLUE),
)


def architecture() -> Figure:
    """Processes of a run, and their connections."""
    figure, axes = canvas(10.5, 4.2)
    for name, lines, (x, y), color in NODES:
        box(axes, (x, y), (3.1, 1.4), color)
        axes.text(x + 1.55, y + 1.05, name, ha="center", weight="bold")
        axes.text(x + 1.55, y + 0.5, lines, ha="center", va="center", fontsize=9.5)
    for start, end, words, place, color in FLOWS:
        arrow(axes, start, end, color)
        axes.text(*place, words, ha="center", va="center", fontsize=9)
    return figure


WEIGHTS = ("model.layers.0.mlp.up_proj.weight", "model.layers.31.mlp.down_proj.weight")
"""Weights of Llama-3.1-8B: split by rows in the first stage, and by columns in the last."""


def push() -> Figure:
    """Boxes of two weights on ranks and on workers, from the real plan."""
    dims = ParallelDims(tensor=2, pipeline=2)
    with TemporaryDirectory() as folder:
        path = write_config(Path(folder), "Llama-3.1-8B")
        shape = read_shape(path)
    rollout = load_config(
        FOLDER.parent / "configs" / "tiny_cpu.yaml", ["rollout.tensor_parallel_size=4"]
    ).rollout
    shares = list(all_shares(first_senders(shape, dims), worker_layouts(shape, rollout)))
    figure, axes = canvas(9.6, 4.6)
    axes.text(2.0, 4.35, "4 ranks, TP2 PP2", ha="center", weight="bold")
    axes.text(7.6, 4.35, "an engine's 4 workers, TP4", ha="center", weight="bold")
    for number, weight in enumerate(WEIGHTS):
        copies = [(rank, x) for rank, x in shares if x.have.tensor == weight]
        bottom = 2.45 - 2.25 * number
        ends = tuple(map(max, zip(*(x.box.end for _, x in copies), strict=True)))
        words = f"{weight.removeprefix('model.')}\n{list(ends)}"
        axes.text(4.8, bottom + 0.9, words, ha="center", va="center", fontsize=8)
        arrow(axes, (3.4, bottom + 0.35), (6.2, bottom + 0.35), INK)
        for left, places in (
            (0.6, {(x.have.box, f"rank {rank}", rank) for rank, x in copies}),
            (6.2, {(x.box, f"worker {x.worker}\nfrom {rank}", rank) for rank, x in copies}),
        ):
            for piece, label, rank in sorted(places, key=str):
                draw_piece(axes, piece, ends, (left, bottom), label, RANKS[rank])
    return figure


def draw_piece(
    axes: Axes,
    piece: Box,
    whole: tuple[int, ...],
    corner: tuple[float, float],
    label: str,
    color: str,
) -> None:
    """A box of a matrix that is drawn 2.8 by 1.6 inches, rows downwards."""
    (row, column), (rows, columns) = piece.start, piece.size
    width, height = 2.8 * columns / whole[1], 1.6 * rows / whole[0]
    x = corner[0] + 2.8 * column / whole[1]
    y = corner[1] + 1.6 * (1 - row / whole[0]) - height
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.35, edgecolor="none"))
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=INK, linewidth=1))
    axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8)


SHOWN_STEPS = 2


def step(run_dir: Path) -> Figure:
    """Two steps in the middle of a run with a generation ahead."""
    timeline = json.loads((run_dir / "timeline.json").read_text(encoding="utf-8"))
    events = [event for event in timeline if event["ph"] == "X"]
    last = max(x["args"].get("step", 0) for x in events) // 2 + 1
    shown = [x for x in events if last - SHOWN_STEPS < x["args"].get("step", 0) <= last]
    begin, end = min(x["ts"] for x in shown), max(x["ts"] + x["dur"] for x in shown)
    shown = [x for x in events if x["ts"] + x["dur"] > begin and x["ts"] < end]
    names = list(dict.fromkeys(x["name"] for x in shown if x["dur"] > (end - begin) / 200))
    colors = dict(zip(names, mpl.colormaps["tab10"].colors, strict=False))
    figure, axes = pyplot.subplots(figsize=(10.5, 2.2))
    for event in shown:
        first = max(event["ts"], begin)
        seconds = (min(event["ts"] + event["dur"], end) - first) / 1e6
        color = colors.get(event["name"], INK)
        axes.barh(-event["tid"], seconds, left=(first - begin) / 1e6, color=color, height=0.7)
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=name)
    axes.set_yticks([0, -1], ["ranks", "engines"], color=INK)
    axes.tick_params(colors=INK)
    axes.set_xlabel("seconds", color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    return figure


if __name__ == "__main__":
    main()
