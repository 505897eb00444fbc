"""Train the tiny model of `configs/learn_tiny.yaml` with several losses, and draw their rewards.

python -m demo.learning_curves --model models/tiny_qwen3 --out docs/learning_curves.png
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from demo.make_kinds import write

CONFIG = Path(__file__).parents[1] / "configs" / "learn_tiny.yaml"
RECIPES = {
    "grpo": ["grpo.loss_type=grpo"],
    "dapo": ["grpo.loss_type=dapo", "grpo.epsilon_high=0.28", "grpo.dynamic_sample=true"],
    "gspo": [
        "grpo.loss_type=grpo",
        "grpo.importance_sampling_level=sequence",
        "grpo.epsilon=0.003",
        "grpo.epsilon_high=0.004",
    ],
    "cispo": ["grpo.loss_type=cispo", "grpo.epsilon_high=5.0"],
}
"""Overrides of the config; the clip bounds are those of the papers on DAPO, GSPO (times ten, since
sequences are short) and ScaleRL."""


def rewards(run_dir: Path) -> list[float]:
    """The mean reward of every step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def draw(curves: dict[str, list[float]], out: Path) -> None:
    """Reward over optimizer steps, a line for each recipe."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny_qwen3"))
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curves.png"))
    arguments = parser.parse_args()
    data = arguments.runs / "kinds.jsonl"
    write(data)
    for name, recipe in RECIPES.items():
        common = [f"model.path={arguments.model}", f"data.path={data}"]
        run_dir = f"train.run_dir={arguments.runs / name}"
        command = [sys.executable, "-m", "megatron_grpo.cli", "train", CONFIG]
        subprocess.run([*command, *common, run_dir, *recipe], check=True)
    draw({name: rewards(arguments.runs / name) for name in RECIPES}, arguments.out)


if __name__ == "__main__":
    main()
