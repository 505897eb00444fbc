"""Plots of a run: draws `curves.png` from `metrics.jsonl`."""

from collections.abc import Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.reporting.run import Run
from megatron_grpo.reporting.tracking import METRICS_FILE
from megatron_grpo.timing import is_in_background

CURVES_FILE = "curves.png"
Record = dict[str, float]
Curve = np.ndarray[tuple[int], np.dtype[np.float64]]

INK, FAINT, GRID = "#22303c", "#8595a5", "#e6ebf0"
BLUE, RED, GREEN, PURPLE, ORANGE = "#2f6fb5", "#c8483c", "#2e8f6b", "#7a5ab5", "#d98a2b"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, "#4fa9c4", "#a8792f", "#6b7a89", "#c58bb4")
PHASES = {
    "generate": BLUE,
    "wait_rollout": "#9dbfe3",
    "score": ORANGE,
    "pack": "#c58bb4",
    "logprobs": GREEN,
    "train": PURPLE,
    "push": RED,
    "await_engines": "#e8b0aa",
    "verify_weights": "#8c2f26",
    "load": "#b9a8dd",
    "sleep": "#6b7a89",
    "save": "#4fa9c4",
    "log": "#a8792f",
}
"""Colour of each phase of a step, equal in all pictures."""
SMOOTHED_STEPS = 60
"""Curves with at least so many steps get a moving average."""


def draw_curves(run_dir: Path) -> Path:
    """Draw reward, lengths, entropy, shares, KL, gap, gradient norm and time; returns the PNG's
    path. Raises ValueError without a `metrics.jsonl`, or without steps in it."""
    records = Run(run_dir).metrics()
    if not records:
        raise ValueError(f"{run_dir / METRICS_FILE} has no steps yet: nothing to draw")
    if not _of_steps(records):
        raise ValueError(f"{run_dir / METRICS_FILE} has no steps yet: only an evaluation")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(16, 7.2), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    has_kl = len(_curve(records, "kl")[1]) > 0
    panels = {
        "r": draw_reward,
        "l": draw_lengths,
        "s": draw_shares,
        "e": draw_entropy,
        "k": draw_kl,
        "g": draw_gap,
        "n": draw_grad_norm,
        "t": draw_time,
    }
    # Without a reference there is no KL, and time is twice as wide.
    for name, axis in figure.subplot_mosaic("rlse;kgnt" if has_kl else "rlse;gntt").items():
        _dress(axis, records)
        panels[name](axis, records)
    figure.suptitle(_title(run_dir, records), x=0.012, ha="left", fontsize=14, color=INK)
    path = run_dir / CURVES_FILE
    save_picture(figure, path, dpi=130)
    return path


def save_picture(figure: Figure, path: Path, dpi: int) -> None:
    """Write `figure` to a PNG file; on a full disk an earlier file stays whole."""
    picture = BytesIO()
    figure.savefig(picture, dpi=dpi)
    write_whole(path, picture.getvalue())


def draw_reward(axis: Axes, records: Sequence[Record]) -> None:
    """Mean reward in total and per function (if several), and its spread within groups; with
    evaluations also pass@k and mean@n of the held-out prompts, or mean@n of each named set."""
    _name(axis, "Reward")
    _line(axis, *_curve(records, "reward"), BLUE, "mean")
    _line(axis, *_curve(records, "reward_group_std"), FAINT, "std within groups")
    found = dict.fromkeys(name for record in _of_steps(records) for name in record)
    names = [n for n in found if n.startswith("reward/") and n.endswith("/mean")]
    if len(names) > 1:
        for name, color in zip(names, cycle(PALETTE[1:]), strict=False):
            label = name.removeprefix("reward/").removesuffix("/mean")
            _line(axis, *_curve(records, name), color, label)
    held_out = {n: text for r in records for n in r if (text := _evaluation_label(n))}
    for (name, label), color in zip(held_out.items(), cycle(PALETTE[:0:-1]), strict=False):
        axis.plot(*_curve(records, name), color=color, ls="--", marker="o", ms=3.5, label=label)
    num_curves = len(axis.get_legend_handles_labels()[1])
    if num_curves <= 4:
        _legend(axis)
        return
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top + 0.06 * num_curves * (top - bottom))  # room for the legend
    _legend(axis, num_columns=2)


def draw_kl(axis: Axes, records: Sequence[Record]) -> None:
    """KL to the reference per response token, estimated by `grpo.kl_estimator`."""
    _name(axis, "KL to the reference (nats per token)")
    steps, kl = _curve(records, "kl")
    _line(axis, steps, kl, PURPLE)
    if kl.min() >= 0:  # the estimator k1 may be negative
        axis.set_ylim(bottom=0)


def draw_lengths(axis: Axes, records: Sequence[Record]) -> None:
    """Completion lengths: the mean, and the range from shortest to longest."""
    _name(axis, "Completion length (tokens)")
    steps, shortest = _curve(records, "completions/min_length")
    longest = _curve(records, "completions/max_length")[1]
    axis.fill_between(steps, shortest, longest, color=GREEN, alpha=0.13, lw=0)
    _line(axis, *_curve(records, "completions/mean_length"), GREEN, "mean, shortest to longest")
    axis.set_ylim(bottom=0)
    _legend(axis)


def draw_shares(axis: Axes, records: Sequence[Record]) -> None:
    _name(axis, "Shares of completions and groups")
    _line(axis, *_curve(records, "completions/clipped_ratio"), ORANGE, "completions cut off")
    _line(axis, *_curve(records, "frac_reward_zero_std"), INK, "groups without signal")
    axis.set_ylim(0, 1)
    _legend(axis)


def draw_entropy(axis: Axes, records: Sequence[Record]) -> None:
    _name(axis, "Entropy (nats per token)")
    _line(axis, *_curve(records, "entropy"), BLUE)
    axis.set_ylim(bottom=0)


def draw_gap(axis: Axes, records: Sequence[Record]) -> None:
    """|engine - trainer| of log-probabilities of sampled tokens."""
    _name(axis, "Log-probability gap, engine to trainer")
    steps, largest = _curve(records, "rollout/logprob_gap_max")
    if len(steps):
        _line(axis, steps, largest, FAINT, "largest")
    _line(axis, *_curve(records, "rollout/logprob_gap_mean"), RED, "mean")
    log_scale(axis)
    _legend(axis)


def log_scale(axis: Axes) -> None:
    """Make the vertical axis logarithmic if a value is above 0: else it would have no range."""
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axis.get_lines()])
    if not (values > 0).any():
        axis.set_ylim(bottom=0)
        return
    axis.set_yscale("log")
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))


def draw_grad_norm(axis: Axes, records: Sequence[Record]) -> None:
    """Global gradient norm before clipping; marks skipped steps, which have none."""
    _name(axis, "Gradient norm before clipping")
    _line(axis, *_curve(records, "grad_norm"), ORANGE)
    axis.set_ylim(bottom=0)
    skipped = [record["step"] for record in records if record.get("skipped_steps")]
    if skipped:
        axis.plot(skipped, [0.0] * len(skipped), "x", color=RED, clip_on=False, label="skipped")
        _legend(axis)


def draw_time(axis: Axes, records: Sequence[Record]) -> None:
    """Seconds of each step, stacked by phase in execution order; a generation in the background
    counts with the time that the step waited for it."""
    _name(axis, "Seconds per step")
    records = _of_steps(records)
    found = {
        n: None for r in records for n in r if n.startswith("time/") and not is_in_background(n, r)
    }
    phases = [name for name in found if name not in ("time/step", "time/eval")]
    steps = [record["step"] for record in records]
    edges = [steps[0] - 0.5, *(step + 0.5 for step in steps)]
    below = np.zeros(len(records))
    for name in phases:
        above = below + [
            0.0 if is_in_background(name, record) else record.get(name, 0.0) for record in records
        ]
        label = name.removeprefix("time/")
        color = PHASES.get(label, FAINT)
        axis.stairs(above, edges, baseline=below, fill=True, color=color, alpha=0.85, label=label)
        below = above
    width = len(axis.get_subplotspec().colspan)  # type: ignore[union-attr]  # of a grid, always
    num_columns = min(3 * width - 1, len(phases) // 2 + 1)  # as wide as the panel
    axis.set_ylim(0, (1.1 + 0.1 * len(phases) / num_columns) * below.max())
    _legend(axis, num_columns)


def _evaluation_label(name: str) -> str | None:
    """Legend text of an evaluation's metric; None for metrics without a curve."""
    match name.split("/"):
        case ["eval", metric] if "@" in metric:
            return name
        case ["eval", held_out, metric] if metric.startswith("mean@"):
            return f"{held_out} {metric}"
    return None


def _of_steps(records: Sequence[Record]) -> Sequence[Record]:
    """Records without evaluation-only ones (before the first step, or after a resume)."""
    return [record for record in records if "time/step" in record]


def _curve(records: Sequence[Record], name: str) -> tuple[Curve, Curve]:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _line(axis: Axes, steps: Curve, values: Curve, color: str, label: str | None = None) -> None:
    if len(values) < SMOOTHED_STEPS:
        (line,) = axis.plot(steps, values, color=color, lw=2, marker="o", ms=3.5, label=label)
        line.set_clip_on(False)  # draws a point on an edge whole, such as a norm of 0
        line.set_in_layout(False)  # without clipping, the layout would make room for points
        return
    axis.plot(steps, values, color=color, lw=0.8, alpha=0.35)
    width = len(values) // 20
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    middle = steps[width // 2 :][: len(smooth)]  # "valid" has len(values) - width + 1 averages
    axis.plot(middle, smooth, color=color, lw=2, label=label)


def _dress(axis: Axes, records: Sequence[Record]) -> None:
    first, last = records[0]["step"], records[-1]["step"]
    axis.set_xlim(first - 0.5, last + 0.5)
    axis.set_xlabel("step", color=FAINT)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(color=GRID, lw=0.8, which="both")
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=FAINT, length=0, labelsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)


def _name(axis: Axes, name: str) -> None:
    axis.set_title(name, loc="left", color=INK, fontsize=11, fontweight="bold")


def _legend(axis: Axes, num_columns: int = 1) -> None:
    axis.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=num_columns)


def _title(run_dir: Path, records: Sequence[Record]) -> str:
    rewards = _curve(records, "reward")[1]
    reward = f"reward {rewards[0]:.2f} → {rewards[-1]:.2f}" if len(rewards) else "no reward"
    return f"{run_dir.resolve().name}   step {records[-1]['step']:.0f}   {reward}"
