import json
import signal
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from helpers.models.conversions import file_size_limit
from megatron_grpo.reporting.report import (
    draw_curves,
    draw_gap,
    draw_grad_norm,
    draw_kl,
    draw_reward,
    draw_time,
)


def record(step: int, **more: float | None) -> dict[str, float | None]:
    return {
        "step": step,
        "kl": None,
        "loss": 0.01,
        "grad_norm": 1.5,
        "reward": 0.1 * step,
        "reward_group_std": 0.3,
        "reward/exact/mean": 0.1 * step,
        "completions/mean_length": 8.0,
        "completions/min_length": 2.0,
        "completions/max_length": 16.0,
        "completions/clipped_ratio": 0.25,
        "frac_reward_zero_std": 0.5,
        "entropy": 1.2,
        "rollout/logprob_gap_mean": 0.01 + 0.001 * step,
        "time/generate": 5.0,
        "time/train": 7.0 + step,
        "time/step": 12.5 + step,
        **more,
    }


def write_metrics(run_dir: Path, records: list[dict[str, float | None]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def axis() -> Axes:
    return Figure().subplots()


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [1, 3, 200])
def test_curves_are_a_picture_of_a_run_of_any_length(tmp_path: Path, num_steps: int) -> None:
    write_metrics(tmp_path, [record(step, kl=0.01) for step in range(1, num_steps + 1)])
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    picture = imread(path)
    assert picture.shape == (936, 2080, 4)
    assert picture[..., :3].std() > 0.05  # something is drawn


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, r"has no metrics\.jsonl: give the folder of a run"),
        ("", r"metrics\.jsonl has no steps yet"),
        ('{"step": 1, "rew', "has no steps yet"),  # cut short
        (json.dumps(record(1)) + "\n\0\0\0\n", "line 2 is damaged"),
        ('{"step": 4, "eval/pass@4": 0.5}\n', "has no steps yet: only an evaluation"),
    ],
    ids=["no file", "empty", "cut short", "damaged", "only an evaluation"],
)
def test_a_run_without_a_step_or_with_a_damaged_line_is_refused(
    tmp_path: Path, text: str | None, error: str
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=error):
        draw_curves(tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("gaps", "scale"),
    [([0.0], "linear"), ([0.0] * 70, "linear"), ([0.0, 0.01], "log"), ([0.01], "log")],
    ids=["a zero", "zeros", "one above 0", "one point"],
)
def test_the_gap_has_a_logarithmic_axis_where_it_has_values(gaps: list[float], scale: str) -> None:
    panel = axis()
    draw_gap(panel, [record(i, **{"rollout/logprob_gap_mean": gap}) for i, gap in enumerate(gaps)])
    panel.figure.canvas.draw()
    assert panel.get_yscale() == scale


@pytest.mark.filterwarnings("error")
def test_draw_curves_draws_a_run_without_reward_and_gradient(tmp_path: Path) -> None:
    zeros = {"rollout/logprob_gap_mean": 0.0, "grad_norm": 0.0, "entropy": 0.0, "kl": 0.0}
    unscored = record(1, **zeros)
    for name in ("reward", "reward_group_std", "reward/exact/mean", "frac_reward_zero_std"):
        del unscored[name]
    write_metrics(tmp_path, [unscored])
    assert imread(draw_curves(tmp_path)).shape == (936, 2080, 4)


def test_a_picture_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    write_metrics(tmp_path, [record(1)])
    (tmp_path / "curves.png").write_bytes(b"the last one")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with file_size_limit(100), pytest.raises(OSError, match=r"too large: '.*/curves\.png'"):
            draw_curves(tmp_path)
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert (tmp_path / "curves.png").read_bytes() == b"the last one"
    assert not (tmp_path / "curves.png.tmp").exists()


@pytest.mark.parametrize("first", [0.01, -0.02])  # k1 may be negative
def test_the_curve_of_kl_begins_at_zero_unless_a_value_is_below(first) -> None:
    panel = axis()
    draw_kl(panel, [record(5, kl=first), record(6, kl=0.03)])
    (line,) = panel.get_lines()
    assert line.get_xydata().tolist() == [[5, first], [6, 0.03]]
    assert panel.get_ylim()[0] == 0 if first > 0 else panel.get_ylim()[0] < first


@pytest.mark.parametrize(
    ("first", "second", "tops"),
    [
        ({}, {"time/save": 3.0}, {"generate": [5, 5], "train": [13, 14], "save": [13, 17]}),
        # Generation during the steps, but not in the second, as after some resumes.
        (
            {"time/score": 1.0, "time/wait_rollout": 0.5},
            {},
            {"train": [8, 9], "wait_rollout": [8.5, 9], "generate": [8.5, 14]},
        ),
    ],
    ids=["a missing phase is zero", "during the steps"],
)
def test_phases_are_stacked_up_to_their_sum(first, second, tops) -> None:
    panel = axis()
    draw_time(panel, [record(1, **first), record(2, **second)])
    found = {patch.get_label(): patch.get_data().values.tolist() for patch in panel.patches}
    assert found == tops


def test_a_phase_has_one_colour_whatever_other_phases_there_are() -> None:
    panels = axis(), axis()
    draw_time(panels[0], [record(1)])
    draw_time(panels[1], [{"time/push": 1.0, **record(1)}])
    colours = [
        {patch.get_label(): patch.get_facecolor() for patch in panel.patches} for panel in panels
    ]
    assert colours[1].items() > colours[0].items()
    assert len(set(colours[1].values())) == 3


def test_curves_of_evaluations_begin_before_the_first_step(
    tmp_path: Path,
) -> None:
    evaluations = [{f"eval/{name}": value} for name, value in (("pass@4", 0.5), ("mean@4", 0.2))]
    before = {"step": 0, "kl": None, "loss": None, "grad_norm": None, "time/eval": 2.0}
    records = [before | evaluations[0], record(1), record(2, **{**evaluations[0], "time/eval": 2})]
    panel = axis()
    draw_reward(panel, records)
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}
    assert lines["eval/pass@4"] == [[0, 0.5], [2, 0.5]]
    assert [step for step, _ in lines["mean"]] == [1, 2]
    panel = axis()
    draw_time(panel, records)  # the seconds before the first step are no step's
    assert [patch.get_data().edges[0] for patch in panel.patches] == [0.5] * len(panel.patches)
    write_metrics(tmp_path, records)
    assert draw_curves(tmp_path).exists()


def test_each_of_several_held_out_sets_and_reward_functions_has_one_curve() -> None:
    sizes = {"math500": 4, "aime24": 32}
    evaluation = {
        f"eval/{name}/{metric}": 0.5
        for name, n in sizes.items()
        for metric in ("pass@1", f"pass@{n}", f"mean@{n}", "reward/exact/mean", "num_prompts")
    }
    panel = axis()
    draw_reward(panel, [record(1, **evaluation, **{"reward/format/mean": 0.5})])
    found = {line.get_label() for line in panel.get_lines()}
    assert found >= {"mean", "exact", "format", "math500 mean@4", "aime24 mean@32"}
    assert not [label for label in found if "pass@" in label]


def test_an_evaluation_that_a_resumed_run_begins_with_is_no_step(tmp_path: Path) -> None:
    evaluated = {"step": 4, "kl": None, "loss": None, "grad_norm": None, "eval/pass@4": 0.5}
    write_metrics(tmp_path, [evaluated, record(5)])
    assert draw_curves(tmp_path).exists()
    panel = axis()
    draw_time(panel, [evaluated, record(5)])
    assert [patch.get_data().edges.tolist() for patch in panel.patches] == [[4.5, 5.5]] * 2


def test_skipped_steps_are_marked_where_the_gradient_norm_is_missing(tmp_path: Path) -> None:
    broken = {"skipped_steps": 1.0, "grad_norm": None, "loss": None}
    records = [record(1, skipped_steps=0.0), record(2, **broken), record(3, skipped_steps=0.0)]
    panel = axis()
    draw_grad_norm(panel, records)
    norms, marks = panel.get_lines()
    assert norms.get_xydata().tolist() == [[1, 1.5], [3, 1.5]]
    assert marks.get_xydata().tolist() == [[2, 0]]
    write_metrics(tmp_path, [record(1, **broken)])  # the only record
    assert draw_curves(tmp_path).exists()
