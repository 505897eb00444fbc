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
from megatron_grpo.reporting.report import save_picture

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
EACH_STEP = [
    "grpo.steps_per_generation=1",
    "grpo.generation_batch_size=64",
    "train.num_steps=60",
]
IN_FLIGHT = [
    "rollout.in_flight_updates=true",
    "grpo.rollout_importance_sampling_mode=token_truncate",
]
STALENESS = {
    "synchronous": EACH_STEP,
    "max_staleness 4": [*EACH_STEP, *IN_FLIGHT, "rollout.max_staleness=4"],
    "max_staleness 8": [*EACH_STEP, *IN_FLIGHT, "rollout.max_staleness=8"],
    "max_staleness 4, over_sampling 2": [
        *EACH_STEP,
        *IN_FLIGHT,
        "rollout.max_staleness=4",
        "rollout.over_sampling=2",
    ],
}
"""One loss on samples of older weights, with a push after every optimizer step."""


def rewards(run_dir: Path) -> list[float]:
    """The mean reward of every step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def steps_to(reward: float, curve: list[float]) -> int | None:
    """Steps until the mean of five reaches `reward`."""
    means = [sum(curve[i - 5 : i]) / 5 for i in range(5, len(curve) + 1)]
    return next((step for step, mean in enumerate(means, start=5) if mean >= reward), None)


def draw(panels: dict[str, dict[str, list[float]]], out: Path) -> None:
    """Draw reward over optimizer steps, a line for each run and a panel for each kind of runs."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, values in curves.items():
            axes.plot(range(1, len(values) + 1), values, label=name)
        axes.set(title=title, xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    save_picture(figure, out, dpi=120)


def train(model: Path, data: Path, run_dir: Path, recipe: list[str]) -> None:
    """Run the config with the overrides of a `recipe`."""
    common = [f"model.path={model}", f"data.path={data}", f"train.run_dir={run_dir}"]
    command = [sys.executable, "-m", "megatron_grpo", "train", CONFIG, *common, *recipe]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny_qwen3"))
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curves.png"))
    arguments = parser.parse_args()
    data = arguments.runs / "kinds.jsonl"
    write(data)
    panels: dict[str, dict[str, list[float]]] = {}
    for title, recipes in {"loss": RECIPES, "staleness, loss grpo": STALENESS}.items():
        curves = panels[title] = {}
        for name, recipe in recipes.items():
            run_dir = arguments.runs / name.replace(" ", "_").replace(",", "")
            train(arguments.model, data, run_dir, recipe)
            curves[name] = rewards(run_dir)
    draw(panels, arguments.out)
    for name, curve in (each for curves in panels.values() for each in curves.items()):
        print(f"{name}: the mean of five steps reaches 0.9 after {steps_to(0.9, curve)} steps")


if __name__ == "__main__":
    main()
