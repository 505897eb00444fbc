"""A random model learns a task from nothing, with every family of losses."""

import pytest

from demo import calculator, calculator_curve
from demo.learning_curves import CONFIG, RECIPES, rewards
from demo.make_kinds import write
from helpers.runs.jobs import Job
from helpers.runs.train import finish_run

pytestmark = pytest.mark.engines

CHANCE, SOLVED, LAST_STEPS, SECONDS = 0.3, 0.9, 5, 180


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "grpo")],
)
def test_the_reward_goes_from_chance_to_nearly_all_in_minutes(
    recipe, tied_model, live_engine, tmp_path
):
    data, run_dir = tmp_path / "kinds.jsonl", tmp_path / recipe
    write(data)
    job = Job(
        [
            f"model.path={tied_model}",
            f"data.path={data}",
            f"train.run_dir={run_dir}",
            f"rollout.engine={live_engine.rollout.engine}",
            f"rollout.base_urls=[{live_engine.servers.base_urls[0]}]",
            *RECIPES[recipe],
        ],
        1,
        tmp_path / "logs_of_ranks",
        config=CONFIG,
        token=live_engine.servers.token,
    )
    with job:
        ended = job.end(SECONDS)
    assert ended.exit_codes == [0], ended.output
    curve = rewards(run_dir)
    assert curve[0] < CHANCE
    assert sum(curve[-LAST_STEPS:]) / LAST_STEPS > SOLVED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_that_mostly_guesses_learns_to_call_its_calculator(tmp_path):
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
