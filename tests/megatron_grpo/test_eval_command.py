import io

from rich.console import Console

from megatron_grpo.eval_command import result_table


def lines(metrics: dict[str, float], names: list[str]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(result_table(metrics, names))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_each_held_out_set_has_a_column():
    metrics = {
        "eval/math500/pass@1": 0.5,
        "eval/math500/num_prompts": 500.0,
        "eval/aime24/pass@1": 0.25,
        "eval/aime24/pass@32": 0.75,
        "eval/aime24/num_prompts": 30.0,
        "time/eval": 12.34,
    }
    assert lines(metrics, ["math500", "aime24"]) == [
        ["metric", "math500", "aime24"],
        ["pass@1", "0.5000", "0.2500"],
        ["num_prompts", "500", "30"],
        ["pass@32", "0.7500"],
        ["12.3", "s"],
    ]
