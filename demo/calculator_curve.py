"""Train the tiny model of `configs/learn_tool.yaml` to call a calculator, and draw its curves.

python -m demo.calculator_curve --out docs/agents_curve.png
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from demo.calculator import write_data, write_model
from demo.learning_curves import steps_to
from megatron_grpo.reporting.report import save_picture

CONFIG = Path(__file__).parents[1] / "configs" / "learn_tool.yaml"


def curves(run_dir: Path) -> dict[str, list[float]]:
    """Mean reward, and share of completions with a call, of every step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {
        "right products (the reward)": [record["reward"] for record in records],
        # A call leads to a second turn, which is the last: agent.max_turns is 2.
        "calls of the calculator": [record["num_turns/mean"] - 1 for record in records],
    }


def draw(found: dict[str, list[float]], out: Path) -> None:
    """Draw reward and share of calls over optimizer steps."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in found.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(xlabel="optimizer step", ylabel="share of completions", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny_calculator"))
    parser.add_argument("--data", type=Path, default=Path("data/products.jsonl"))
    parser.add_argument("--run", type=Path, default=Path("runs/learn_tool"))
    parser.add_argument("--out", type=Path, default=Path("docs/agents_curve.png"))
    arguments = parser.parse_args()
    if not arguments.model.exists():
        write_model(arguments.model)
    write_data(arguments.data)
    command = [sys.executable, "-m", "megatron_grpo", "train", CONFIG]
    command += [f"model.path={arguments.model}", f"data.path={arguments.data}"]
    subprocess.run([*command, f"train.run_dir={arguments.run}"], check=True)
    found = curves(arguments.run)
    draw(found, arguments.out)
    [rewards, _] = found.values()
    print(f"the mean of five steps reaches 0.9 after {steps_to(0.9, rewards)} steps")


if __name__ == "__main__":
    main()
