"""Train a tiny model by `configs/learn_tiny.yaml` with engines of 8 bits, and draw the gap.

Blocks of `fp8` need widths that are multiples of 128:

    python tests/helpers/models/tiny.py models/wide_qwen3 \\
        hidden_size=256 intermediate_size=512 head_dim=64
    PYTHONPATH=tests/engines_on_cpu/plugin:.:tests python -m demo.quantised_curves

Engines on CPUs have 8 bits only with the tests' plugin.
"""

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from demo.learning_curves import train
from demo.make_kinds import write
from megatron_grpo.reporting.report import log_scale, save_picture

AWARE = "rollout.quantization_aware=true"
RECIPES = {
    "bfloat16": [],
    **{
        name + aware: [f"rollout.quantization={name}", *recipe]
        for name in ("fp8", "int8", "fp8_channel")
        for aware, recipe in {"": [], ", aware": [AWARE]}.items()
    },
}
COMMON = [
    "model.dtype=bfloat16",
    "optimizer.lr=1e-3",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "train.num_steps=20",
]
GAP = "logprob_gap_mean"
CAUSES = {
    "of the run": f"probe/{GAP}",
    "trainer's weights quantised once": f"probe/quantized_{GAP}",
}


def records(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of every step."""
    return [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def draw(runs: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Draw reward and gap over optimizer steps, and the part of the gap not caused by weights."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, gap, causes = figure.subplots(1, 3)
    for name, steps in runs.items():
        numbers = range(1, len(steps) + 1)
        reward.plot(numbers, [step["reward"] for step in steps], label=name)
        gap.plot(numbers, [step[f"rollout/{GAP}"] for step in steps], label=name)
    reward.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    gap.set(xlabel="optimizer step", ylabel=f"rollout/{GAP}")
    log_scale(gap)
    for shift, (label, key) in zip((-0.2, 0.2), CAUSES.items(), strict=True):
        heights = [steps[0].get(key, 0.0) for steps in runs.values()]
        causes.barh([row + shift for row in range(len(runs))], heights, 0.4, label=label)
    causes.set(xlabel=f"probe/{GAP}", yticks=range(len(runs)), yticklabels=runs)
    causes.invert_yaxis()
    for axes in (reward, gap, causes):
        axes.grid(alpha=0.3)
    reward.legend()
    causes.legend(loc="center right")
    save_picture(figure, out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/wide_qwen3"))
    parser.add_argument("--runs", type=Path, default=Path("runs/quantised"))
    parser.add_argument("--out", type=Path, default=Path("docs/quantised_curves.png"))
    arguments = parser.parse_args()
    data = arguments.runs / "kinds.jsonl"
    write(data)
    runs = {}
    for name, recipe in RECIPES.items():
        run_dir = arguments.runs / name.replace(", ", "_")
        train(arguments.model, data, run_dir, [*COMMON, *recipe])
        runs[name] = records(run_dir)
        gaps = [step[f"rollout/{GAP}"] for step in runs[name]]
        print(f"{name}: gap {gaps[0]:.4f} at first, {sum(gaps) / len(gaps):.4f} in the mean")
    draw(runs, arguments.out)


if __name__ == "__main__":
    main()
