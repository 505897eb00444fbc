"""Whole runs with asynchronous generation: versions, overlap, and faults."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.engines.live import TestEngine
from helpers.runs.jobs import Runs, write_sums
from helpers.runs.sabotage import InCall, InPhase, die
from helpers.runs.train import (
    read_completions,
    read_json_lines,
    read_metrics,
    read_timeline,
    results,
    steps_of,
)

pytestmark = pytest.mark.fault

NUM_RANKS = 2
NUM_STEPS = 5
REWARD = """
import os, time

def digits(completions, **_):
    '''Share of digits, after a moment in which a rank can train; `hold` is there: after hours.'''
    if os.path.exists({fail!r}):
        raise OSError("no share today")
    if os.path.exists({hold!r}):
        open({hold!r} + "ing", "w").close()
        time.sleep(1000)
    time.sleep(0.2)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""
SYNC = ["rollout.async_generate=false", "train.num_steps=2"]
KEEPS = "train.save_generations=true"
ASYNC = ["rollout.async_generate=true", "grpo.rollout_importance_sampling_mode=token_truncate"]


@pytest.fixture(scope="module")
def async_runs(
    tmp_path_factory: pytest.TempPathFactory, tied_model: Path, reference_engine: TestEngine
) -> Runs:
    folder = tmp_path_factory.mktemp("async")
    (folder / "reward.py").write_text(
        REWARD.format(hold=str(folder / "hold"), fail=str(folder / "fail"))
    )
    common = [
        f"model.path={tied_model}",
        f"data.path={write_sums(folder)}",
        f"reward.functions=[{folder / 'reward.py'}:digits]",
        "reward.timeout=2000",
        f"train.num_steps={NUM_STEPS}",
    ]
    return Runs(common, reference_engine, folder, ("data",))


@pytest.fixture(scope="module")
def whole(async_runs: Runs) -> Path:
    """An asynchronous run of five generations."""
    async_runs.finish("whole", *ASYNC)
    return async_runs.folder / "whole"


@pytest.fixture(scope="module")
def sync(async_runs: Runs) -> Path:
    """A synchronous run of two generations."""
    async_runs.finish("sync", *ASYNC, *SYNC, KEEPS)
    return async_runs.folder / "sync"


def versions(run_dir: Path) -> list[int]:
    """Policy version of each step's samples, which all have the same."""
    found: dict[int, set[int]] = {}
    for row in read_json_lines(run_dir / "completions.jsonl"):
        found.setdefault(row["step"], set()).add(row["policy_version"])
    assert all(len(of_step) == 1 for of_step in found.values())
    return [version for step in sorted(found) for version in found[step]]


def assert_same(run_dir: Path, whole: Path) -> None:
    """Assert the same samples, and the same model in the end."""
    assert read_completions(run_dir) == read_completions(whole)
    name = "hf/model.safetensors"
    assert (run_dir / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.long
def test_async_generations_are_one_generation_old(whole):
    assert versions(whole) == [0, 0, 1, 2, 3]
    records = read_metrics(whole)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1, 1]
    for record in records:
        assert record["time/generate"] > 0 and "time/score" in record  # in their own threads
    for record in records[:-1]:  # behind the last step nothing is generated
        assert 0 < record["time/wait_rollout"] < record["time/step"]
    # Steps 1 and 2 are sampled by version 0; step 2 trains after an update, so a gap appears.
    assert records[0]["rollout/logprob_gap_mean"] < 1e-5
    assert min(record["rollout/logprob_gap_mean"] for record in records[1:]) > 1e-4


@pytest.mark.long
def test_async_run_begins_as_a_synchronous_one(sync, whole):
    staleness = {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0}
    assert results(sync)[0] | staleness == results(whole)[0]
    assert versions(sync) == [0, 1]
    rows = [read_json_lines(d / "completions.jsonl") for d in (sync, whole)]
    assert rows[0][:16] == rows[1][:16] and rows[0][16:32] != rows[1][16:32]


def test_async_generations_are_made_during_the_training(whole):
    found = read_timeline(whole)
    for generation in range(1, NUM_STEPS):
        made = [e for e in found if e["args"].get("generation") == generation]
        assert {e["name"] for e in made} == {"generate", "score"}
        [train] = [e for e in found if e["name"] == "train" and e["args"]["step"] == generation]
        first, last = min(e["ts"] for e in made), max(e["ts"] + e["dur"] for e in made)
        assert first < train["ts"] < last
    assert_alone(found)


def assert_alone(found: list[dict[str, Any]]) -> None:
    """Assert that no weights are pushed and nothing is evaluated while engines generate."""
    made = [e for e in found if e["name"] == "generate" and e["tid"] == 1]
    others = [e for e in found if e["name"] in ("push", "eval_generate")]
    assert made and others
    for other in others:
        for each in made:
            before, after = sorted([other, each], key=lambda e: e["ts"])
            assert before["ts"] + before["dur"] <= after["ts"]


HALVES = ["grpo.steps_per_generation=2", "grpo.dynamic_sample=true", "train.num_steps=6"]
CUT = [
    *HALVES,
    "train.save_interval=3",
    "eval.data.max_prompt_length=64",
    "eval.max_prompts=4",
    "eval.interval=3",
]


@pytest.fixture(scope="module")
def cut(async_runs: Runs) -> Path:
    """Three generations of two steps each, with an evaluation inside of one."""
    async_runs.finish("cut", *ASYNC, *CUT, KEEPS)
    return async_runs.folder / "cut"


@pytest.mark.long
def test_async_engines_keep_weights_inside_a_generation(cut):
    assert versions(cut) == [0, 0, 0, 0, 2, 2]
    records = read_metrics(cut)[1:]  # the first is of the evaluation before all
    assert [r["rollout/staleness_mean"] for r in records] == [0, 0, 1, 1, 1, 1]


def test_async_engines_generate_neither_in_pushes_nor_in_evaluations(cut):
    found = read_timeline(cut)
    assert_alone(found)
    pushes = {e["args"]["step"] for e in found if e["name"] == "push"}
    # At the start, before steps 3 and 5, which begin generations, after step 3, which is evaluated,
    # and after the last.
    assert pushes == {0, 3, 4, 5, 6}
    assert [record["step"] for record in read_metrics(cut) if "eval/num_prompts" in record] == [
        0,
        3,
        6,
    ]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [("sync", SYNC), ("cut", HALVES)])
def test_replay_has_the_same_bits_and_no_engines(async_runs, name, options, request):
    dumped, replayed = request.getfixturevalue(name), async_runs.folder / f"replayed_{name}"
    async_runs.finish(replayed.name, *ASYNC, *options, f"train.replay={dumped}", engine=None)
    of_training = [
        {key: value for key, value in record.items() if not key.startswith("eval/")}
        for record in results(dumped)
        if record["step"]
    ]
    assert results(replayed) == of_training and of_training
    assert_same(replayed, dumped)
    assert not [*replayed.glob("logs/engine_*")]


# Optimizer steps between checkpoints, the step of the kill, the checkpoint that is resumed.
KILLS = {
    "in the last step of a generation": (1, 4, 2),
    "in the first step of one": (1, 5, 2),
    "after an interval that ended inside of one": (3, 6, 4),
    "without a checkpoint": (3, 2, 0),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("interval", "step", "saved"),
    [
        pytest.param(*case, id=name, marks=[] if "last step" in name else [pytest.mark.slow])
        for name, case in KILLS.items()
    ],
)
def test_async_run_killed_goes_on_bit_for_bit(async_runs, cut, interval, step, saved):
    """The next generation is in the checkpoint, or its weights are there to make it again."""
    name = f"killed_{step}"
    arguments = [*ASYNC, *CUT, f"train.save_interval={interval}"]
    with async_runs.start(name, *arguments, sabotage=InPhase(die, 1, "train", step)) as job:
        job.end(60)
    checkpoints = async_runs.folder / name / "checkpoints"
    if saved < step - 1:  # the newest may be there by now, or not
        shutil.rmtree(checkpoints / f"step_{step - 1}", ignore_errors=True)
    assert [each.name for each in checkpoints.glob("step_?")] == [f"step_{saved}"] * bool(saved)
    async_runs.finish(name, *arguments)
    assert results(checkpoints.parent) == results(cut)
    assert_same(checkpoints.parent, cut)


@pytest.mark.long
def test_async_run_preempted_gives_up_what_it_generates(async_runs):
    run_dir, hold = async_runs.folder / "preempted", async_runs.folder / "hold"
    with async_runs.start("preempted", *ASYNC) as job:
        job.wait_for(lambda: len(steps_of(run_dir)) >= 2, 60)
        hold.touch()
        job.wait_for(hold.with_name("holding").exists, 60)
        time.sleep(1.0)  # until the ranks wait for what is held
        job.signal(signal.SIGTERM, 1)
        ended = job.end(60)
    hold.unlink()
    assert ended.exit_codes == [75] * NUM_RANKS, ended.output
    assert ended.survivors == []
    done = len(steps_of(run_dir))
    assert f"preempted: step {done} saved" in ended.output
    async_runs.finish("preempted", *ASYNC)
    lags = [step - version for step, version in enumerate(versions(run_dir))]
    assert lags == [0, *[0 if step == done else 1 for step in range(1, NUM_STEPS)]]


@pytest.mark.slow
def test_rewards_that_fail_during_the_training_lose_no_step(async_runs):
    run_dir, fail = async_runs.folder / "failed", async_runs.folder / "fail"
    with async_runs.start("failed", *ASYNC) as job:
        job.wait_for(lambda: len(steps_of(run_dir)) == 2, 60)
        fail.touch()
        ended = job.end(60)
    fail.unlink()
    assert ended.exit_codes == [1] * NUM_RANKS, ended.output
    assert "no share today" in ended.output
    done = len(steps_of(run_dir))
    assert (run_dir / "checkpoints" / f"step_{done}").is_dir()
    async_runs.finish("failed", *ASYNC)
    assert steps_of(run_dir) == [*range(1, NUM_STEPS + 1)]


def kill_an_engine() -> None:
    """Kill one engine of the run."""
    children = psutil.Process().children(recursive=True)
    engines = [c for c in children if "vllm.entrypoints.openai.api_server" in c.cmdline()]
    os.kill(engines[0].pid, signal.SIGKILL)


OWN = "rollout.startup_timeout=120"
DIES = InCall(kill_an_engine, 0, "megatron_grpo.rollout.runner", "features_of", 3)
"""In the event loop, while groups of the third generation are opened."""


@pytest.mark.slow
def test_engine_that_dies_during_the_training_comes_back(async_runs, whole):
    """The thread that requests its restart ends, and must not take it along."""
    own = OWN, "rollout.num_engines=2"
    ended = async_runs.finish("dies", *ASYNC, *own, engine=None, sabotage=DIES)
    assert ended.output.count("is lost: ended with signal SIGKILL") == 1
    assert versions(async_runs.folder / "dies") == versions(whole)
    names = "step", "prompt_index", "sample_index"
    ours, theirs = (  # from engines of another kind
        [tuple(row[name] for name in names) for row in read_completions(run_dir)]
        for run_dir in (async_runs.folder / "dies", whole)
    )
    assert ours == theirs


@pytest.mark.slow
def test_generation_whose_last_engine_is_lost_is_asked_again(async_runs):
    own = OWN, "rollout.num_engines=1"
    async_runs.finish("alone", *ASYNC, *own, engine=None, sabotage=DIES)
    assert versions(async_runs.folder / "alone") == [0, 0, 2, 2, 3]
