"""A random model learns a task from nothing, with every family of losses."""

import pytest

from demo import calculator, calculator_curve
from demo.learning_curves import CONFIG, RECIPES, rewards
from demo.make_kinds import write
from helpers.runs.jobs import finish_job
from helpers.runs.train import finish_run

pytestmark = pytest.mark.engines

CHANCE, SOLVED, LAST_STEPS = 0.3, 0.9, 5


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "grpo")],
)
def test_recipes_learn_from_chance_to_nearly_all(recipe, tied_model, live_engine, tmp_path):
    data, run_dir = tmp_path / "kinds.jsonl", tmp_path / recipe
    write(data)
    paths = f"model.path={tied_model}", f"data.path={data}"
    finish_job(run_dir, *paths, *RECIPES[recipe], config=CONFIG, engine=live_engine)
    curve = rewards(run_dir)
    assert curve[0] < CHANCE
    assert sum(curve[-LAST_STEPS:]) / LAST_STEPS > SOLVED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agent_learns_to_call_its_calculator(tmp_path):
    model, data, run_dir = tmp_path / "model", tmp_path / "products.jsonl", tmp_path / "run"
    calculator.write_model(model)
    calculator.write_data(data)
    ended = finish_run(
        *(f"model.path={model}", f"data.path={data}", f"train.run_dir={run_dir}"),
        "train.num_steps=20",
        config=calculator_curve.CONFIG,
        timeout=600,
    )
    assert ended.exit_code == 0, ended.output
    right, calls = calculator_curve.curves(run_dir).values()
    assert right[0] < CHANCE
    assert calls[0] < CHANCE
    assert sum(right[-LAST_STEPS:]) / LAST_STEPS > SOLVED
