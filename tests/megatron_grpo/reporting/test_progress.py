import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from megatron_grpo.reporting.progress import (
    ProgressBar,
    completions_by_prompt,
    evaluation_line,
    step_line,
)

METRICS = {
    "reward": 0.3125,
    "reward_std": 0.21,
    "completions/mean_length": 12.3,
    "completions/min_length": 4.0,
    "completions/max_length": 16.0,
    "tokens_per_second": 1312.4,
    "time/generate": 9.21,
    "time/score": 0.01,
    "time/train": 8.1,
    "time/step": 18.4,
    "skipped_steps": 0.0,
}


def shown(show: Callable[[ProgressBar], None], *, terminal: bool) -> str:
    """Return what a bar of 15 steps prints."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None)
    bar = ProgressBar(2, 15, console)
    show(bar)
    bar.close()
    return file.getvalue()


def two_steps(bar: ProgressBar) -> None:
    bar.show(3, METRICS)
    bar.show(4, METRICS)


def test_step_line_shows_what_a_sum_or_a_mean_would_hide() -> None:
    assert step_line(3, 15, METRICS) == (
        "step  3/15  reward 0.312 ± 0.210  length 12.3 (4-16)  1312 tokens/s  18.4 s"
    )
    assert "kl 0.0123" in step_line(3, 15, METRICS | {"kl": 0.01234})
    assert step_line(3, 15, METRICS | {"reward/math/mean": 0.3125}) == step_line(3, 15, METRICS)
    assert step_line(3, 15, METRICS | {"skipped_steps": 1.0}).endswith("18.4 s  skipped")
    unscored = {name: value for name, value in METRICS.items() if not name.startswith("reward")}
    assert step_line(3, 15, unscored) == (
        "step  3/15  no reward: all failed  length 12.3 (4-16)  1312 tokens/s  18.4 s"
    )
    more = {
        "reward/math/mean": 0.25,
        "reward/math/std": 0.1,
        "reward/format/mean": 0.0625,
        "frac_reward_zero_std": 0.75,
        "completions/clipped_ratio": 0.94,
    }
    assert step_line(3, 15, METRICS | more) == (
        "step  3/15  reward 0.312 ± 0.210  (math 0.250, format 0.062)  75% of groups equal  "
        "length 12.3 (4-16)  94% cut  1312 tokens/s  18.4 s"
    )


EVALUATION = {
    "eval/pass@1": 0.3125,
    "eval/pass@8": 0.75,
    "eval/mean@8": 0.4,
    "eval/reward/exact/mean": 0.4,
    "eval/failed": 0.0,
    "eval/num_prompts": 64.0,
}


def test_evaluation_line_names_its_set() -> None:
    line = evaluation_line("", EVALUATION | {"eval/failed": 3.0})
    assert line == (
        "evaluation  pass@1 0.312  pass@8 0.750  mean@8 0.400  64 prompts  "
        "3 completions without a score"
    )
    sets = {
        metric.replace("eval/", f"eval/{name}/"): value
        for name in ("aime24", "aime")
        for metric, value in EVALUATION.items()
    }
    assert evaluation_line("aime", sets | {"eval/aime/pass@1": 0.5}) == (
        "evaluation of aime  pass@1 0.500  pass@8 0.750  mean@8 0.400  64 prompts"
    )


def test_show_evaluation_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.bars.LINE_SECONDS", 0.0)

    def evaluate(bar: ProgressBar) -> None:
        for num_done in (0, 32, 64):
            bar.evaluation.show("aime24", num_done, 64)
            bar._bar.refresh()
        bar.show_evaluation(2, "", EVALUATION)

    output = {terminal: shown(evaluate, terminal=terminal) for terminal in (False, True)}
    assert output[False].splitlines() == [
        "evaluation of aime24: 0 of 64 prompts",
        "evaluation of aime24: 32 of 64 prompts",
        f"step  2/15  {evaluation_line('', EVALUATION)}",
    ]
    assert "32/64 ━━" in output[True] and "64/64" not in output[True].split("\r")[-1]


def test_waiting_shows_how_many_engines_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.bars.LINE_SECONDS", 0.0)

    def wait(bar: ProgressBar) -> None:
        with bar.waiting("engines start", "answer") as show:
            show(1, 2)
            bar._bar.refresh()

    output = {terminal: shown(wait, terminal=terminal) for terminal in (False, True)}
    assert output[False].splitlines() == [
        "engines start ...",
        "engines start: 1 of 2 answer",
        "engines start: 0 s",
    ]
    assert re.search(r"1/2 +━━.* engines start", output[True])
    assert "1/2" not in output[True].split("\r")[-1]


def test_enter_shows_the_phase_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def generate(bar: ProgressBar) -> None:
        bar.enter("generate")
        clock[0] = 107.2
        bar._bar.refresh()

    assert "generate 7 s" in shown(generate, terminal=True)


def test_completions_have_scores_of_each_function_of_their_source() -> None:
    row = {
        "step": 3,
        "prompt_index": 0,
        "prompt": "[b]How much[/b] is 7 + 5?",
        "completion": "[12]",
        "rewards": {"math": 1.0, "format": None},
        "reward": None,
        "advantage": 0.0,
        "finish_reason": "stop",
        "columns": {},
    }
    console = Console(file=io.StringIO(), width=120)
    # Of another source.
    other = row | {"prompt": "[b]And[/b]?", "rewards": {"environment": 0.5}, "reward": 0.5}
    console.print(completions_by_prompt([row, other]))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    ours, others = (
        [cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "[12]" in line
    )
    assert ours == ["[12]", "1.000", "failed", "failed", "0.000", "stop"]
    assert others == ["[12]", "0.500", "0.500", "0.000", "stop"]
    assert {row["prompt"], other["prompt"]} <= set(map(str.strip, lines))


def test_show_without_a_terminal_is_one_plain_line() -> None:
    lines = shown(two_steps, terminal=False).splitlines()
    assert [line.split("  reward")[0] for line in lines] == ["step  3/15", "step  4/15"]
    assert lines[0].endswith("18.4 s: generate 9.2, train 8.1")
    assert "\x1b" not in "".join(lines)


def test_show_on_a_terminal_is_a_bar_at_the_last_step() -> None:
    bar = shown(two_steps, terminal=True).split("\r")[-1]
    assert " 4/15 ━━" in bar
