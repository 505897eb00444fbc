"""Evaluation in whole runs, and by `megatron-grpo eval`."""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.engines.live import TestEngine
from helpers.models.towers import tiny_multimodal
from helpers.pushes.trainers import as_soon_as
from helpers.runs.environments import write_environments
from helpers.runs.jobs import NUM_STEPS, Runs, assert_same_run
from helpers.runs.sabotage import InPhase, preempt
from helpers.runs.train import TINY_CONFIG, Finished, read_json_lines, read_metrics
from megatron_grpo.config.file import load_config
from megatron_grpo.eval_command import FolderEvaluation
from megatron_grpo.launch.run_dir import bearer

NUM_PROMPTS, NUM_SAMPLES = 6, 8
SAMPLING = [
    "eval.data={}",
    f"eval.max_prompts={NUM_PROMPTS}",
    f"eval.num_generations={NUM_SAMPLES}",
    "eval.k=[1,2,4]",
    "eval.top_p=0.9",
    "eval.temperature=0.8",
    "eval.pass_threshold=0.1",
]
EVALUATED = [*SAMPLING, "eval.interval=1"]
"""An evaluation after each step, also amid a generation of two steps."""
SETS = ["eval.data=null", "eval.sets.a.data={}", "eval.sets.b.data={}"]
"""Follow `SAMPLING`: two sets with its options."""


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics of the evaluations, by step."""
    records = [
        (record["step"], {k: v for k, v in record.items() if k.startswith("eval/")})
        for record in read_metrics(run_dir)
    ]
    assert len({step for step, _ in records}) == len(records)
    return {step: metrics for step, metrics in records if metrics}


def num_operations(engine: TestEngine) -> Counter[str]:
    """How often vLLM was put to sleep, and woken."""
    headers = bearer(engine.servers.token)
    page = httpx.get(f"{engine.servers.base_urls[0]}/metrics", headers=headers).text
    name = "vllm:sleep_mode_operation_duration_seconds_count"
    found = re.findall(rf'^{name}{{operation="(\w+)"}} (\S+)$', page, re.MULTILINE)
    return Counter({operation: int(float(count)) for operation, count in found})


@pytest.fixture(scope="module")
def tour(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    """An evaluated run whose engine sleeps while all state of the ranks takes its place, and the
    engine's sleep operations."""
    run_dir, before = tmp_path_factory.mktemp("evaluated") / "run", num_operations(runs.engine)
    leaves = "train.offload=all", "train.offload_communicators=true"
    ended = runs.finish(run_dir, *EVALUATED, "rollout.enable_sleep_mode=true", *leaves)
    assert f"step 0/{NUM_STEPS}  evaluation  pass@1 0." in ended.output
    return run_dir, num_operations(runs.engine) - before


@pytest.fixture(scope="module")
def evaluated(tour: tuple[Path, Counter[str]]) -> Path:
    return tour[0]


def without_evaluation_before(run_dir: Path, folder: Path) -> Path:
    """A copy of the files that `assert_same_run` compares, without the record of step 0."""
    (folder / "hf").mkdir(parents=True)
    for name in ("hf/model.safetensors", "completions.jsonl", "config.yaml"):
        (folder / name).write_bytes((run_dir / name).read_bytes())
    records = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(records[0])["step"] == 0
    (folder / "metrics.jsonl").write_text("".join(records[1:]))
    return folder


@pytest.mark.long
def test_evaluations_sleep_and_offload_change_no_bit_of_a_run(evaluated, undisturbed, tmp_path):
    assert_same_run(without_evaluation_before(evaluated, tmp_path / "copy"), undisturbed)


def test_engines_sleep_whenever_ranks_train(tour):
    """Before the ranks build the model, before the probe, and before each step, since the
    evaluation before it uses engines. As many pushes wake the weights, and then the cache."""
    run_dir, operations = tour
    assert operations == {"sleep": 2 + NUM_STEPS, "wake": 2 * (2 + NUM_STEPS)}
    falls_asleep = [record["step"] for record in read_metrics(run_dir) if "time/sleep" in record]
    assert falls_asleep == [*range(1, NUM_STEPS + 1)]


def test_evaluation_is_in_the_record_of_its_step(evaluated):
    found = evaluations(evaluated)
    assert list(found) == [*range(NUM_STEPS + 1)]
    for metrics in found.values():
        assert metrics.keys() > {"eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/mean@8"}
        assert metrics["eval/num_prompts"] == NUM_PROMPTS
    assert all(record["time/eval"] > 0 for record in read_metrics(evaluated))
    rows = read_json_lines(evaluated / "eval_completions.jsonl")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(found, NUM_PROMPTS * NUM_SAMPLES)
    for step, metrics in found.items():
        passed = [row["passed"] for row in rows if row["step"] == step]
        assert metrics["eval/pass@1"] == pytest.approx(sum(passed) / len(passed))
        rewards = [row["reward"] for row in rows if row["step"] == step]
        assert metrics["eval/mean@8"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.slow
def test_run_stopped_in_an_evaluation_makes_it_later(runs, evaluated, tmp_path):
    """The evaluation of step 2: metrics.jsonl has it once, in the record of step 2."""
    run_dir = tmp_path / "run"
    # Each of the two before takes 3 rounds of generating and scoring, and is logged.
    sabotage = InPhase(preempt, 0, "eval", nth=15)
    runs.finish(run_dir, *EVALUATED, sabotage=sabotage, code=75)
    assert [record["step"] for record in read_metrics(run_dir)] == [0, 1, 2]
    assert list(evaluations(run_dir)) == [0, 1]
    runs.finish(run_dir, *EVALUATED)
    assert_same_run(
        without_evaluation_before(run_dir, tmp_path / "ours"),
        without_evaluation_before(evaluated, tmp_path / "theirs"),
    )
    assert evaluations(run_dir) == evaluations(evaluated)
    completions = "eval_completions.jsonl"
    assert (run_dir / completions).read_bytes() == (evaluated / completions).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("interval", "num_steps", "step", "code"), [(1, 1, 1, 0), (3, 4, 3, 0), (3, 6, 3, 75)]
)
def test_run_names_an_evaluation_that_it_never_makes(
    runs, tmp_path, interval, num_steps, step, code
):
    """After the last step, or amid a generation, whose other step is then trained and saved."""
    sabotage = InPhase(preempt, 0, "eval", nth=8)
    options = [f"eval.interval={interval}", f"train.num_steps={num_steps}"]
    ended = runs.finish(tmp_path / "run", *SAMPLING, *options, sabotage=sabotage, code=code)
    assert f"step {step} was not evaluated" in ended.output
    assert ended.output.count("the model is") == (code == 0)
    assert list(evaluations(tmp_path / "run")) == [0]


HOOKS = """
class Stop:
    def on_step_end(self, step, metrics):
        return step == 1

class Notes:
    def __init__(self, run_dir):
        self.file = run_dir / "notes"

    def on_step_end(self, step, metrics):
        self.note("step", step, metrics["reward"])

    def on_evaluation(self, step, metrics):
        self.note("evaluation", step, metrics["eval/a/mean@8"])

    def on_checkpoint(self, step, folder):
        self.note("checkpoint", step, (folder / "manifest.json").exists())

    def note(self, *what):
        with self.file.open("a") as file:
            print(*what, file=file)
"""


@pytest.mark.slow
def test_run_that_a_hook_ends_goes_on_with_another_and_two_sets(runs, undisturbed, tmp_path):
    """`Stop` asks amid a generation. Neither `eval` nor hooks change what is learnt: a resumed run
    may gain or lose them. Among its checkpoints, the one that it resumed from may be the best."""
    run_dir, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(HOOKS)
    ended = runs.finish(run_dir, f"train.hooks=[{file}:Stop]")
    last = f"stopped by {file}:Stop after step 2 of {NUM_STEPS}: the model is {run_dir / 'hf'};"
    assert last in ended.output
    ended = runs.finish(run_dir, f"train.hooks=[{file}:Stop]")
    assert f"is complete: {file}:Stop stopped it after step 2" in ended.output
    sets = [*SETS, "eval.sets.b.num_generations=4", "eval.sets.b.max_prompts=3"]
    options = [*SAMPLING, "eval.interval=2", *sets, f"train.hooks=[{file}:Notes]"]
    options += ["train.keep_best=eval/a/mean@8", "train.keep_checkpoints=1"]
    ended = runs.finish(run_dir, *options)
    assert f"step 2/{NUM_STEPS}  evaluation of a  pass@1 0." in ended.output
    assert f"step 2/{NUM_STEPS}  evaluation of b  pass@1 0." in ended.output
    assert_same_run(run_dir, undisturbed)
    found = evaluations(run_dir)
    assert list(found) == [*range(2, NUM_STEPS + 1, 2)]
    for metrics in found.values():
        assert metrics.keys() > {"eval/a/mean@8", "eval/b/mean@4", "eval/a/pass@4"}
        assert (metrics["eval/a/num_prompts"], metrics["eval/b/num_prompts"]) == (NUM_PROMPTS, 3)
    rows = read_json_lines(run_dir / "eval_completions.jsonl")
    of_step = {"a": 48, "b": 12}
    assert Counter((row["step"], row["set"]) for row in rows) == {
        (s, name): n for s in found for name, n in of_step.items()
    }
    values = {step: metrics["eval/a/mean@8"] for step, metrics in found.items()}
    best = max(values, key=values.__getitem__)
    kept = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert kept == {f"step_{best}", f"step_{NUM_STEPS}", "best", "LATEST"}
    assert f"is of step {best}, in checkpoints/best" in ended.output
    told = [f"step {record['step']} {record['reward']}" for record in read_metrics(run_dir)[2:]]
    told += [f"evaluation {step} {value}" for step, value in values.items()]
    told += ["checkpoint 4 True", f"checkpoint {NUM_STEPS} True"]
    assert Counter((run_dir / "notes").read_text().splitlines()) == Counter(told)


def evaluate(*arguments: str, timeout: float = 300) -> Finished:
    """`megatron-grpo eval`, as a user calls it."""
    command = [sys.executable, "-m", "megatron_grpo", "eval", str(TINY_CONFIG), *arguments]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=TINY_CONFIG.parents[1],
        check=False,
    )
    return Finished(result.returncode, result.stdout + result.stderr, 0.0, [])


@pytest.fixture(scope="module")
def arguments(runs: Runs) -> list[str]:
    """Arguments of the runs, without their engine."""
    return [*runs.arguments[:2], *SAMPLING]


@pytest.mark.slow
def test_eval_command_equals_the_last_evaluation(evaluated, arguments, tmp_path):
    """The same numbers by vLLM with weights that it has loaded, not received by a push."""
    ended = evaluate(
        *arguments, f"model.path={evaluated / 'hf'}", f"train.run_dir={tmp_path / 'run'}"
    )
    assert ended.exit_code == 0, ended.output
    out = tmp_path / "run" / "eval"
    assert f"{out}\n" in ended.output and "pass@4" in ended.output
    result = json.loads((out / "eval.json").read_text())
    assert result["model"] == str(evaluated / "hf")
    assert result["config"]["eval"]["top_p"] == 0.9
    check_last(evaluated, result["metrics"], out)


def check_last(evaluated: Path, found: dict[str, Any], out: Path) -> None:
    """Assert that an evaluation written to `out` equals the run's last."""
    metrics = {k: v for k, v in found.items() if k.startswith("eval/")}
    assert metrics == evaluations(evaluated)[NUM_STEPS]
    rows = read_json_lines(evaluated / "eval_completions.jsonl")[-NUM_PROMPTS * NUM_SAMPLES :]
    assert read_json_lines(out / "eval_completions.jsonl") == [
        {name: value for name, value in row.items() if name != "step"} for row in rows
    ]


@pytest.mark.slow
def test_evaluation_starts_a_dead_engine_again(evaluated, arguments, tmp_path, capfd):
    cfg = load_config(TINY_CONFIG, [*arguments, f"model.path={evaluated / 'hf'}"])
    with closing(FolderEvaluation(cfg, tmp_path)) as evaluation:
        engine = evaluation.servers.processes[evaluation.servers.base_urls[0]]
        [held_out] = evaluation._evaluations._evaluations.values()
        with as_soon_as(lambda: held_out._samples, engine.process.kill):
            check_last(evaluated, evaluation.run(), tmp_path)
    assert "is lost" in capfd.readouterr().err


@pytest.mark.slow
def test_the_command_evaluates_dialogues(arguments, tmp_path):
    cfg = load_config(
        TINY_CONFIG,
        [
            *arguments,
            f"environment.name={write_environments(tmp_path)}:Echo",
            "environment.max_turns=2",
            f"rollout.stop_token_ids={list(range(20, 60))}",
            "rollout.max_completion_length=100",
        ],
    )
    with closing(FolderEvaluation(cfg, tmp_path / "out")) as evaluation:
        metrics = evaluation.run()
    assert 1 < metrics["eval/num_turns/mean"] <= 2
    rows = read_json_lines(tmp_path / "out" / "eval_completions.jsonl")
    assert {*rows[0]["rewards"]} == {"share_of_digits", "environment"}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["environment.name=demo/environments.py:Chess"], ["eval: environment demo/", "Chess"]),
        (["rollout.base_urls=[http://127.0.0.1:1]"], ["set rollout.base_urls=[]"]),
        (["rollout.vllm.load_format=dummy"], ["rollout.vllm.load_format=hf"]),
        (["eval.data.path=none.jsonl"], ["eval: data.path none.jsonl does not exist"]),
        (["rollout.vllm.max_model_len=60"], ["eval.max_completion_length 12", "max_model_len 60"]),
        (
            ["eval.reward.functions=[demo/rewards.py:math]"],
            ["eval: reward functions", "demo/rewards.py has no function or class 'math'"],
        ),
        ([*SETS, "eval.sets.b.data.path=none.jsonl"], ["eval.sets.b: data.path none.jsonl does"]),
        (
            [*SETS, "eval.sets.b.max_completion_length=20", "rollout.vllm.max_model_len=80"],
            ["eval.sets.b.data: a prompt", "eval.sets.b.max_completion_length 20"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_evaluation_is_refused_before_an_engine_starts(arguments, overrides, parts, tmp_path):
    cfg = load_config(TINY_CONFIG, [*arguments, *overrides])
    with pytest.raises(ValueError) as refused:
        FolderEvaluation(cfg, tmp_path / "out")
    for part in parts:
        assert part in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_without_held_out_prompts_nothing_is_evaluated(arguments, tmp_path):
    cfg = load_config(TINY_CONFIG, arguments[:2])
    with pytest.raises(ValueError, match=r"give eval.data.path=FILE, or, .* several sets in"):
        FolderEvaluation(cfg, tmp_path / "out")


def test_engines_that_could_not_serve_other_towers_are_refused(arguments, tmp_path):
    path = f"model.path={tiny_multimodal(tmp_path / 'towers', 'mistral3')}"
    cfg = load_config(
        TINY_CONFIG, [*arguments, path, "model.dtype=bfloat16", "rollout.quantization=int8"]
    )
    with pytest.raises(ValueError, match=r"rollout.quantization is int8, and model.path"):
        FolderEvaluation(cfg, tmp_path / "out")
