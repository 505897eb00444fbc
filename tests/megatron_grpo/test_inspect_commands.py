import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_grpo.cli import app


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps, with four completions in each: of prompts 0 and 1, in turns."""
    rows = [
        {
            "step": step,
            "prompt_index": i % 2,
            "prompt": f"<|user|>What is {i % 2}?<|assistant|>",
            "messages": [{"role": "user", "content": f"What is {i % 2}?"}],
            "completion": f"step {step} number {i}",
            "rewards": {"exact": reward, "short": i / 4},
            "reward": reward,
            "advantage": 0.0,
            "finish_reason": "stop",
            "columns": {"answer": str(i % 2)},
        }
        for step in (1, 2)
        for i, reward in enumerate((0.5, 1.0, None, 0.0))
    ]
    (tmp_path / "completions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return tmp_path


def show(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "120"})


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], {0: [0, 2], 1: [1, 3]}),
        (["--worst", "2"], {0: [2], 1: [3]}),
        (["--best", "2"], {1: [1], 0: [0]}),
        (["--worst", "3", "--best", "3"], {0: [2, 0], 1: [3, 1]}),
        (["--best", "2", "--by", "short"], {1: [3], 0: [2]}),
        (["--prompt", "1", "--best", "1"], {1: [1]}),
    ],
)
def test_show_prints_the_requested_completions_of_a_step_below_their_prompts(
    run_dir, options, numbers
):
    rewards = ("0.500", "1.000", "failed", "0.000")
    for step, choice in ((2, []), (1, ["--step", "1"])):
        lines = show(str(run_dir), *choice, *options).output.splitlines()
        shown = [line for line in lines if "prompt" in line or "user" in line or "number" in line]
        expected = []
        for prompt, own in numbers.items():
            expected += [f"step {step}, prompt {prompt}", f"user: What is {prompt}?"]
            expected += [
                (f"step {step} number {i}", rewards[i], f"{i / 4:.3f}", rewards[i]) for i in own
            ]
        cells = [tuple(map(str.strip, line.split("│")[1:5])) for line in shown]
        assert [each or line for each, line in zip(cells, shown, strict=True)] == expected


def test_show_prints_the_rows_of_an_evaluation_whatever_their_number(tmp_path):
    row = {
        "prompt_index": 0,
        "prompt": "What?",
        "completion": "",
        "rewards": {"exact": 1.0},
        "reward": 1.0,
        "passed": True,
        "finish_reason": "stop",
        "columns": {"answer": "12"},
    }
    rows = [row | {"completion": f"number {i}"} for i in range(1000)]
    (tmp_path / "eval_completions.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    output = show(str(tmp_path)).output
    assert output.count("number ") == 1000
    assert output.count("What?") == output.count("answer: 12") == 1
    assert "advantage" not in output and "step" not in output


def test_show_says_what_there_is_if_there_is_nothing_to_show(run_dir):
    missing = show(str(run_dir), "--step", "3").exception
    assert str(missing).endswith("no completions in step 3; the last step is 2")
    assert "give the folder of a run" in str(show(str(run_dir.parent)).exception)
