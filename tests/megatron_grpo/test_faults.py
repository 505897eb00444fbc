"""Faults in jobs of four ranks: reported, ended in time without remains, and resumed bit for bit.

Each test breaks a run at its second step, asserts how it ends, starts the same command again and
compares the result with an undisturbed run.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.engines.live import Proxy
from helpers.runs.jobs import NUM_RANKS, Runs, assert_resumes, assert_same_run
from helpers.runs.sabotage import (
    LIMIT,
    Both,
    InCall,
    InPhase,
    WithoutMargin,
    crash,
    die,
    fail,
    lack_memory,
    leave,
    preempt,
    refuse,
    sleep,
    slower_than_any_limit,
    slowly,
    spin,
    stop,
)
from helpers.runs.train import read_json_lines, steps_of
from megatron_grpo.checkpoints.folders import latest_step

pytestmark = [pytest.mark.engines, pytest.mark.timed]

# The others are slow tests: one of each kind is enough where test_kills.py kills ranks at random
# moments, and the state machines of limits and checkpoints have tests of their own.
ALWAYS = {
    "rank 0 is killed in training",
    "a rank fails in training",
    "a rank hangs in C",
    "SIGUSR1, and SIGTERM during the save",
    "in the generation",
    "a bit of the weights",
}


def cases(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[] if name in ALWAYS else [pytest.mark.slow],
        )
        for name, case in table.items()
    ]


DEATH_SECONDS = 40
HANG_SECONDS = 60
PREEMPTED = 75


def while_rank_0_generates(deed: Callable[[], None], rank: int) -> InCall:
    """In the second rollout, for which all ranks ask the engines together."""
    return InCall(deed, rank, "megatron_grpo.rollout.schedule", "ask_engines", 2)


DEATHS = {
    "rank 0 is killed in generation": (InPhase(die, 0, "generate"), "rank 0"),
    "rank 0 is killed in training": (InPhase(die, 0, "train"), "rank 0"),
    "rank 0 is killed while it pushes": (InPhase(die, 0, "push"), "rank 0"),
    "rank 0 is killed while it saves": (InPhase(die, 0, "save"), "rank 0"),
    "a rank is killed while it builds the model": (
        InCall(die, 2, "megatron_grpo.rank", "policy_of"),
        "rank 2",
    ),
    "a rank is killed while rank 0 generates": (while_rank_0_generates(die, 3), "rank 3"),
    "a rank is killed before it computes log-probabilities": (
        InPhase(die, 1, "logprobs"),
        "rank 1",
    ),
    "a rank is killed in training": (InPhase(die, 3, "train"), "rank 3"),
    "a rank is killed in the last step of a generation": (InPhase(die, 3, "train", 4), "rank 3"),
    "a rank is killed while it pushes": (InPhase(die, 2, "push"), "rank 2"),
    "a rank is killed while it saves": (InPhase(die, 1, "save"), "rank 1"),
    "a rank leaves with exit code 0": (InPhase(leave, 1, "train"), "rank 1"),
    "a rank reads where nothing is": (InPhase(crash, 3, "train"), "rank 3"),
    "a rank fails in training": (InPhase(fail, 1, "train"), "planted failure"),
    "a rank fails in a save": (InPhase(fail, 2, "save"), "planted failure"),
    "a rank fails while rank 0 generates": (
        while_rank_0_generates(fail, 1),
        "planted failure",
    ),
    "a rank has no memory left": (InPhase(lack_memory, 1, "logprobs"), "planted lack of memory"),
    "a rank finds what its user can mend": (InPhase(refuse, 2, "train"), "planted refusal"),
}


@pytest.mark.parametrize(("sabotage", "cause"), cases(DEATHS))
def test_a_rank_that_ends_is_named_and_the_job_gone(sabotage, cause, runs, undisturbed, tmp_path):
    with runs.start(tmp_path / "run", sabotage=sabotage) as job:
        first = job.ranks[sabotage.rank]
        first.join(60)
        ended = job.end(DEATH_SECONDS)
    assert all(code != 0 for rank, code in enumerate(ended.exit_codes) if rank != sabotage.rank)
    assert ended.survivors == []
    reports = [output for output in ended.outputs if cause in output]
    assert reports, ended.output
    if sabotage.rank != 0:  # rank 0 has the terminal: it reports, and once
        assert ended.outputs[0].count("megatron-grpo: ") == 1, ended.outputs[0]
    assert_resumes(runs, tmp_path / "run", undisturbed)


HANGS = {
    "a rank is stopped in training": InPhase(stop, 3, "train"),
    "a rank is stopped while rank 0 generates": while_rank_0_generates(stop, 2),
    "rank 0 is stopped": InPhase(stop, 0, "train"),
    "a rank spins": InPhase(spin, 2, "train"),
    "a rank hangs in C": InPhase(sleep, 1, "train"),
}


@pytest.mark.parametrize("sabotage", cases(HANGS))
def test_a_rank_that_hangs_is_named_and_the_job_ends(sabotage, runs, undisturbed, tmp_path):
    with runs.start(tmp_path / "run", "train.hang_timeout=8", sabotage=sabotage) as job:
        others = [process for rank, process in enumerate(job.ranks) if rank != sabotage.rank]
        for process in others:
            process.join(30 + HANG_SECONDS)
            assert process.exitcode not in (None, 0), job.output
        job.signal(signal.SIGKILL, sabotage.rank)  # as its launcher does; a stopped rank cannot
        ended = job.end(DEATH_SECONDS)
    assert f"rank {sabotage.rank}" in ended.output
    assert ended.survivors == []
    assert_resumes(runs, tmp_path / "run", undisturbed)


SLOW_FILES = {
    "weights": InCall(slower_than_any_limit, 2, "megatron_grpo.policy.model", "read_weights"),
    "the last checkpoint": InCall(
        slower_than_any_limit, 2, "megatron_grpo.checkpoints.manifest", "write_hashed"
    ),
}


@pytest.mark.parametrize("slow", cases(SLOW_FILES))
def test_a_slow_file_system_is_no_hang(slow, runs, tmp_path):
    limits = [f"rollout.startup_timeout={LIMIT}", f"train.hang_timeout={LIMIT}"]
    once = ["train.num_steps=2", "train.save_interval=100"]
    runs.finish(tmp_path / "run", *limits, *once, sabotage=WithoutMargin(slow))


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
# Signals one after another, the ranks that get them, and the phase.
PREEMPTIONS = {
    "SIGTERM to rank 0 in generation": ([TERM], (0,), InPhase(slowly, 0, "generate")),
    "SIGTERM to another rank in generation": ([TERM], (2,), InPhase(slowly, 0, "generate")),
    "SIGTERM to a rank in training": ([TERM], (3,), InPhase(slowly, 3, "train")),
    "SIGUSR1 to a rank in a push": ([USR1], (1,), InPhase(slowly, 1, "push")),
    "SIGUSR1 to rank 0 in a save": ([USR1], (0,), InPhase(slowly, 0, "save")),
    "SIGTERM to all": ([TERM], (), InPhase(slowly, 0, "train")),
    "SIGTERM before the last step of a generation": ([TERM], (1,), InPhase(slowly, 0, "save", 1)),
    "SIGUSR1, and SIGTERM during the save": ([USR1, TERM], (), InPhase(slowly, 1, "train")),
}


@pytest.mark.parametrize(("signals", "ranks", "slow"), cases(PREEMPTIONS))
def test_a_preempted_job_saves_and_says_so(signals, ranks, slow, runs, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    with runs.start(run_dir, "train.save_interval=100", sabotage=slow) as job:
        metrics = run_dir / "metrics.jsonl"
        job.wait_for(lambda: metrics.exists() and metrics.stat().st_size, 60)
        for number in signals:
            job.signal(number, *ranks)
        ended = job.end(60)
    assert ended.exit_codes == [PREEMPTED] * NUM_RANKS, ended.output
    assert ended.survivors == []
    assert (run_dir / "checkpoints" / "LATEST").read_text() == "step_2\n"
    assert_resumes(runs, run_dir, undisturbed)


def test_job_preempted_in_its_first_step_saves_nothing(runs, tmp_path):
    first = InPhase(preempt, 0, "generate", nth=1)
    ended = runs.finish(tmp_path / "run", code=PREEMPTED, seconds=60, sabotage=first)
    assert "preempted: no step was done, nothing is saved" in ended.outputs[0], ended.outputs[0]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# The slow phase in which the last save gets written, the phase in which the run hangs, and the
# checkpoint that counts by then.
POLLS = {
    "in the generation": (InPhase(slowly, 0, "generate"), InPhase(sleep, 1, "logprobs"), 2),
    "in the update": (InPhase(slowly, 0, "train", 3), InPhase(sleep, 1, "save", 3), 2),
}


@pytest.mark.parametrize(("slow", "end", "saved"), cases(POLLS))
def test_checkpoint_counts_before_the_next_step_ends(slow, end, saved, runs, tmp_path):
    pointer = tmp_path / "run" / "checkpoints" / "LATEST"
    with runs.start(tmp_path / "run", sabotage=Both(slow, end)) as job:
        job.wait_for(lambda: pointer.exists() and pointer.read_text() == f"step_{saved}\n", 60)


@pytest.fixture(scope="module")
def half_run(runs: Runs) -> Path:
    """A run that was killed in its last step, with two checkpoints."""
    run_dir = runs.folder / "half"
    pointer = run_dir / "checkpoints" / "LATEST"
    with runs.start(run_dir, sabotage=InPhase(sleep, 1, "train", nth=6)) as job:
        job.wait_for(lambda: pointer.exists() and pointer.read_text() == "step_4\n", 60)
    return run_dir


def flip(path: Path, place: float = 0.5) -> None:
    """Flip one bit at this fraction of the file's length."""
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * place))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def weights_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# Damage to the newest checkpoint, and the fault in the message.
DAMAGES = {
    "a bit of the weights": (lambda step: flip(weights_file(step)), ".distcp is damaged"),
    "the end of the weights": (lambda step: truncate(weights_file(step)), ".distcp has"),
    "a file of weights": (lambda step: weights_file(step).unlink(), ".distcp is missing"),
    "a bit of the index": (lambda step: flip(step / ".metadata"), ".metadata is damaged"),
    "the state": (lambda step: (step / "trainer.json").unlink(), "trainer.json is missing"),
    "the list of hashes": (lambda step: (step / "manifest.json").unlink(), "no manifest.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "cause"), cases(DAMAGES))
def test_damaged_checkpoint_is_named_and_not_used(
    damage, cause, runs, half_run, undisturbed, tmp_path
):
    run_dir = shutil.copytree(half_run, tmp_path / "run")
    damage(run_dir / "checkpoints" / "step_4")
    ended = runs.finish(run_dir)
    assert "step_4 is not used" in ended.outputs[0] and cause in ended.outputs[0], ended.output
    assert_same_run(run_dir, undisturbed)


@pytest.mark.slow
def test_newest_good_checkpoint_is_found_without_pointer(runs, half_run, undisturbed, tmp_path):
    run_dir = shutil.copytree(half_run, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "LATEST").unlink()
    shutil.copytree(checkpoints / "step_4", checkpoints / "step_9.partial")
    assert_resumes(runs, run_dir, undisturbed)
    assert list(checkpoints.glob("*.partial")) == []


@pytest.mark.long
def test_run_without_a_good_checkpoint_is_refused(runs, half_run, tmp_path):
    run_dir = shutil.copytree(half_run, tmp_path / "run")
    steps = sorted((run_dir / "checkpoints").glob("step_?"))
    for step in steps:
        flip(weights_file(step))
    ended = runs.finish(run_dir, code=2)
    for step in steps:
        assert f"{step.name} is not used" in ended.outputs[0], ended.outputs[0]


@pytest.mark.slow
def test_run_with_other_prompts_is_refused(runs, tmp_path):
    data, run_dir = tmp_path / "rows.jsonl", tmp_path / "run"
    shutil.copy(runs.folder / "sums.jsonl", data)
    rows = data.read_text()
    runs.finish(run_dir, f"data.path={data}", "train.num_steps=1")
    data.write_text(rows + rows.splitlines()[0] + "\n")
    ended = runs.finish(run_dir, f"data.path={data}", "train.num_steps=2", code=2)
    number = len(rows.splitlines())
    assert f"of step 1 was made with {number} prompts" in ended.outputs[0], ended.outputs[0]
    assert f"now give {number + 1} prompts" in ended.outputs[0], ended.outputs[0]
    data.write_text(rows)
    runs.finish(run_dir, f"data.path={data}", "train.num_steps=2")


# Body of the reward function while a file exists, and the message.
REWARD_FAULTS = {
    "raises": ("raise RuntimeError('planted')", "planted"),
    "hangs": ("time.sleep(1000)", "no result after 3.0 s"),
    "gives a score that is no number": ("return [float('nan')] * len(completions)", "nan"),
    "kills its process": ("os.kill(os.getpid(), 9)", "SIGKILL"),
    "takes all memory": ("list(range(10**10))", "reward.memory_megabytes"),
}
REWARD = """
import os, time
from demo.rewards import share_of_digits as share

def share_of_digits(completions, **columns):
    if os.path.exists({flag!r}):
        {fault}
    return share(completions, **columns)
"""


@pytest.mark.parametrize(("fault", "cause"), cases(REWARD_FAULTS))
def test_a_reward_that_fails_stops_the_run_and_is_no_reward(
    fault, cause, runs, undisturbed, tmp_path
):
    flag, run_dir, file = tmp_path / "flag", tmp_path / "run", tmp_path / "reward.py"
    file.write_text(REWARD.format(flag=str(flag), fault=fault))
    overrides = [f"reward.functions=[{file}:share_of_digits]", "reward.timeout=3.0"]
    flag.touch()
    ended = runs.finish(run_dir, *overrides, code=1, seconds=60)
    assert "reward function share_of_digits" in ended.outputs[0]
    assert cause in ended.outputs[0], ended.outputs[0]
    flag.unlink()
    runs.finish(run_dir, *overrides)
    assert_same_run(run_dir, undisturbed)


@pytest.mark.slow
def test_steps_before_a_reward_that_fails_are_saved(runs, undisturbed, tmp_path):
    flag, run_dir, file = tmp_path / "flag", tmp_path / "run", tmp_path / "reward.py"
    file.write_text(REWARD.format(flag=str(flag), fault="raise RuntimeError('planted')"))
    overrides = [f"reward.functions=[{file}:share_of_digits]", "train.save_interval=100"]
    with runs.start(run_dir, *overrides) as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), seconds=60)
        flag.touch()
        ended = job.end(60)
    assert ended.exit_codes == [1] * NUM_RANKS, ended.output
    assert "generation 1 failed: reward function share_of_digits" in ended.outputs[0]
    assert latest_step(run_dir / "checkpoints") == 2
    flag.unlink()
    runs.finish(run_dir, *overrides)
    assert_same_run(run_dir, undisturbed)


def test_a_job_that_scores_for_long_is_preempted_all_the_same(runs, tmp_path):
    scores, run_dir, file = tmp_path / "scores", tmp_path / "run", tmp_path / "reward.py"
    fault = f"open({str(scores)!r}, 'w'); time.sleep(1000)"
    file.write_text(REWARD.format(flag=str(tmp_path), fault=fault))
    overrides = [f"reward.functions=[{file}:share_of_digits]", "reward.timeout=2000"]
    with runs.start(run_dir, *overrides) as job:
        job.wait_for(scores.exists, 60)
        job.signal(TERM, 2)
        ended = job.end(60)
    assert ended.exit_codes == [PREEMPTED] * NUM_RANKS, ended.output
    assert ended.survivors == []


@pytest.fixture
def way_to_the_engine(runs: Runs) -> Iterator[Proxy]:
    """A proxy to the only engine; runs get its address."""
    proxy = Proxy(runs.engine.servers.base_urls[0])
    yield proxy
    proxy.cut()


def test_job_whose_last_engine_is_lost_saves_and_resumes(
    runs, undisturbed, way_to_the_engine, tmp_path
):
    run_dir, limit = tmp_path / "run", 10
    arguments = [f"rollout.base_urls=[{way_to_the_engine.url}]", f"rollout.startup_timeout={limit}"]
    with runs.start(run_dir, *arguments) as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), seconds=60)
        way_to_the_engine.cut()
        ended = job.end(limit + 30)
    assert ended.exit_codes == [1] * NUM_RANKS, ended.output
    assert ended.outputs[0].count("megatron-grpo: no rollout engine serves any more") == 1
    assert ended.survivors == []
    assert_resumes(runs, run_dir, undisturbed)


def test_job_waits_for_its_last_engine(runs, undisturbed, way_to_the_engine, tmp_path):
    """All four ranks push to it together before it generates again."""
    run_dir = tmp_path / "run"
    with runs.start(run_dir, f"rollout.base_urls=[{way_to_the_engine.url}]") as job:
        job.wait_for(lambda: 1 in steps_of(run_dir), seconds=60)
        way_to_the_engine.cut()
        job.wait_for(lambda: "is lost" in job.output, seconds=60)
        way_to_the_engine.mend()
        ended = job.end(90)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    assert "is back" in ended.outputs[0]
    asked, expected = (
        [record["prompt"] for record in read_json_lines(folder / "completions.jsonl")]
        for folder in (run_dir, undisturbed)
    )
    assert asked == expected
    assert steps_of(run_dir) == steps_of(undisturbed)
