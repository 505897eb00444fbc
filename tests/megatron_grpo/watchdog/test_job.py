"""The verdict on a job from the events of its ranks: no processes, sockets or waiting."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.oracle.policies import tiny_config
from megatron_grpo.watchdog.job import (
    MARGIN_SECONDS,
    End,
    Failure,
    Intervals,
    Job,
    Limit,
    Limits,
    Position,
)
from megatron_grpo.watchdog.stacks import place_of, stragglers
from parallel import ParallelDims
from parallel.weight_transfer import TIMEOUT

pytestmark = pytest.mark.fast

INTERVALS = Intervals(silence=20, grace=0.5, stacks=2)
LIMITS = Limits(
    start=Limit(300, "rollout.startup_timeout"),
    step=Limit(45, "train.hang_timeout"),
    push=Limit(75, "train.hang_timeout"),
)

WAITING = """  File "/x/train_step.py", line 9, in train_step
  File "/x/torch/distributed/distributed_c10d.py", line 3, in all_reduce"""
RECEIVING = """  File "/x/schedules.py", line 9, in recv_forward
  File "/x/megatron/core/pipeline_parallel/p2p_communication.py", line 3, in _communicate_shapes"""
BUSY = '  File "/x/loss.py", line 9, in grpo_loss'


def job(world_size: int = 4, *, step: int = 0, phase: str = "start", joined: int = 4) -> Job:
    """A job whose ranks joined at second 0 and are at the same position."""
    found = Job(world_size, LIMITS, INTERVALS, 0.0)
    for rank in range(joined):
        found.on_connect(rank, f"node{rank // 2}", 100 + rank, 0.0)
    all_at(found, Position(1, phase), 0.0)
    all_at(found, Position(step, phase), 0.0)
    return found


def all_at(found: Job, position: Position, now: float) -> None:
    for rank in found.members:
        found.on_heartbeat(rank, position, now)


def beats_until(found: Job, seconds: int) -> None:
    """Send heartbeats without progress, on which the job must not end."""
    for now in range(seconds):
        for rank, member in found.members.items():
            found.on_heartbeat(rank, member.position, now)
        assert not found.wants_stacks(now) and found.verdict(now) is None, now


def test_verdict_names_a_dead_rank_after_the_grace():
    found = job(step=7, phase="train")
    found.on_disconnect(3, 10.0)
    assert found.verdict(10.4) is None
    assert found.verdict(10.5) == End(
        1, "megatron-grpo: rank 3 on node1 (pid 103) died in phase train of step 7"
    )


def test_consequence_of_another_failure_is_not_the_cause():
    found = job(step=7, phase="train")
    found.on_exception(0, Failure("gloo: closed by peer", is_consequence=True), 10.0)
    found.on_exception(1, Failure("link to rank 3 lost", "Traceback", is_consequence=True), 10.1)
    found.on_disconnect(3, 10.3)
    found.on_exception(2, Failure("KeyError"), 10.4)
    end = found.verdict(10.5)
    assert end is not None and "rank 3 on node1 (pid 103) died" in end.text


def test_exit_after_a_reported_failure_is_no_death():
    found = job()
    found.on_exception(2, Failure("lower it", "Traceback", is_for_user=True), 1.0)
    found.on_disconnect(2, 1.1)
    place = "rank 2 on node1 (pid 102) failed in phase start"
    assert found.verdict(2.0) == End(2, "megatron-grpo: lower it", f"{place}:\nTraceback\n")


def test_job_ends_when_the_last_rank_has_finished():
    found = job()
    for rank in (1, 2, 3, 0):
        assert found.verdict(1.0) is None
        found.on_finish(rank, End(75, "saved"), 1.0)
    assert found.verdict(1.0) == End(75, "saved")


def test_silent_rank_is_named():
    found = job(step=2, phase="save")
    for now in range(1, 20):
        for rank in (0, 1, 3):
            found.on_heartbeat(rank, Position(2, "save"), now)
        assert found.verdict(now) is None
    end = found.verdict(20.0)
    assert end is not None and end.code == 1
    assert "rank 2 on node1 (pid 102), in phase save of step 2, has not answered" in end.text


@pytest.mark.parametrize(
    ("step", "phase", "seconds"),
    [(2, "train", 45), (2, "", 45), (2, "hooks_Mine", 45), (2, "push", 75), (1, "train", 300)],
)
def test_limit_is_that_of_the_phase_of_rank_0(step, phase, seconds):
    found = job(step=step, phase=phase)
    beats_until(found, seconds)
    assert found.wants_stacks(seconds)


def test_microbatch_on_one_rank_is_progress_of_all():
    found = job(step=2, phase="train")
    beats_until(found, 44)
    found.on_heartbeat(3, Position(2, "train", num_ticks=1), 44.0)
    assert not found.wants_stacks(88.0)
    assert found.wants_stacks(89.0)


def test_hang_is_reported_with_the_stack_of_the_straggler():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0) and not found.wants_stacks(45.1)
    for rank in (0, 1, 3):
        found.members[rank].stack = WAITING
    assert found.verdict(46.0) is None
    found.members[2].stack = BUSY
    end = found.verdict(46.1)
    assert end is not None and end.code == 1
    assert end.text.splitlines() == [
        "megatron-grpo: no rank has made progress for 45 s (train.hang_timeout); rank 0 is in "
        "phase train of step 2; if that is only slow, set train.hang_timeout=90",
        "stragglers, 1 of 4 ranks:",
        "rank 2 on node1 (pid 102), phase train of step 2, has stood for 46 s: "
        "/x/loss.py:9 in grpo_loss",
        "the stacks of all ranks are in logs/stacks.txt",
    ]
    assert end.stacks.count(WAITING) == 3 and BUSY in end.stacks


def test_rank_that_reports_no_stack_is_the_straggler():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0)
    for rank in (0, 1, 2):
        found.members[rank].stack = WAITING
    assert found.verdict(46.9) is None
    end = found.verdict(47.0)
    assert (
        end is not None
        and "(pid 103), phase train of step 2, has stood for 47 s: it did not" in end.text
    )


def end_while_computing(found: Job, busy: int, stack: str) -> tuple[float, str]:
    """Time and text of the end of a job whose rank `busy` uses a CPU at this stack."""
    for now in range(1, 2000):
        for rank, member in found.members.items():
            found.on_heartbeat(rank, member.position, now, cpu=float(now) if rank == busy else 1.0)
        if found.wants_stacks(now):
            for rank, member in found.members.items():
                member.stack = stack if rank == busy else WAITING
        if end := found.verdict(now):
            return now, end.text
    raise AssertionError("it does not end")


def test_rank_that_computes_has_four_limits():
    ended, text = end_while_computing(job(step=2, phase="train"), 2, BUSY)
    assert ended == 4 * 45
    assert "has made progress for 180 s (train.hang_timeout)" in text
    assert "set train.hang_timeout=360" in text and "rank 2 on node1" in text


def test_rank_that_spins_in_a_collective_does_not_compute():
    assert end_while_computing(job(step=2, phase="train"), 2, WAITING)[0] == 45


def test_rank_that_has_computed_and_then_waits_is_looked_at_again():
    found = job(step=2, phase="train")
    for now in range(1, 100):
        for rank, member in found.members.items():
            found.on_heartbeat(rank, member.position, now, cpu=float(min(now, 40)))
            member.stack = BUSY
        if found.wants_stacks(now):
            for member in found.members.values():
                member.stack = BUSY
        if found.verdict(now):
            break
    assert now == 90


def test_gpus_wait_by_spinning_so_the_use_of_cpus_means_nothing():
    found = job(step=2, phase="train")
    found._limits = replace(LIMITS, is_cpu_progress=False)
    assert end_while_computing(found, 2, BUSY)[0] == 45


@pytest.mark.parametrize(("slow", "seconds"), [(86.9, 173.8), (10, 45)])
def test_phase_may_take_twice_as_long_as_the_longest_of_this_run(slow, seconds):
    found = job(step=1, phase="train")
    all_at(found, Position(1, "train", num_ticks=1), slow)
    begun = slow + 1
    all_at(found, Position(1, "push", num_ticks=1), begun)
    all_at(found, Position(2, "train"), begun)
    assert not found.wants_stacks(begun + seconds - 0.1)
    assert found.wants_stacks(begun + seconds)


def test_seconds_of_a_long_limit_are_written_as_digits():
    found = job(step=2, phase="train")
    found._limits = replace(LIMITS, step=Limit(1800, "train.hang_timeout"))
    ended, text = end_while_computing(found, 2, WAITING)
    assert ended == 1800
    assert "progress for 1800 s (train.hang_timeout)" in text and "hang_timeout=3600" in text


LINE = '  File "{}", line 9, in f'
PACKAGES = "/opt/venv/lib/python3.13/site-packages"


@pytest.mark.parametrize(
    "library",
    ["/usr/lib/python3.12/threading.py", f"{PACKAGES}/a.py", "/usr/lib/python3/dist-packages/a.py"],
)
@pytest.mark.parametrize("own", ["/home/x/loss.py", f"{PACKAGES}/megatron_grpo/loss.py"])
def test_place_of_is_in_this_project(own, library):
    assert place_of("\n".join(map(LINE.format, [library, own, library]))) == f"{own}:9 in f"


def test_place_of_is_the_innermost_line_of_ours():
    assert place_of(WAITING) == "/x/train_step.py:9 in train_step"
    assert place_of('File "/lib/torch/_ops.py", line 3, in call') == "/lib/torch/_ops.py:3 in call"


def test_progress_while_stacks_arrive_ends_the_hang():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0)
    all_at(found, Position(2, "train", num_ticks=1), 46.0)
    assert found.verdict(47.0) is None


def test_ranks_that_never_connect_are_named():
    found = job(joined=2)
    beats_until(found, 300)
    assert found.wants_stacks(300.0)
    end = found.verdict(302.0)
    assert end is not None and "never joined the job: rank 2, 3" in end.text


STRAGGLERS = {
    # Also where pipeline stages wait in different places, and later stages are behind.
    "the one outside a collective": (
        [BUSY, WAITING, RECEIVING, RECEIVING],
        [(2, 3), (2, 3), (2, 1), (2, 1)],
        [0],
    ),
    "the one behind": ([WAITING] * 4, [(2, 3), (2, 3), (2, 2), (2, 3)], [2]),
    "the one that skipped a collective": (
        [WAITING, WAITING, RECEIVING, WAITING],
        [(2, 3)] * 4,
        [2],
    ),
    "none, as all wait alike": ([WAITING] * 4, [(2, 3)] * 4, []),
}


@pytest.mark.parametrize(("stacks", "progress", "expected"), STRAGGLERS.values(), ids=STRAGGLERS)
def test_stragglers(stacks, progress, expected):
    assert stragglers(dict(enumerate(stacks)), dict(enumerate(progress))) == expected


def limits_of(*overrides: str, on_gpu: bool = False) -> Limits:
    cfg = tiny_config(Path("unused"), ParallelDims(), *overrides)
    return Limits.from_config(cfg, on_gpu=on_gpu)


@pytest.mark.parametrize("hang_timeout", [7, 400])
def test_limits_exceed_the_time_outs_within_their_phase(hang_timeout):
    step = Limit(hang_timeout, "train.hang_timeout")
    push = max(step, Limit(105, "rollout.stall_timeout"), key=lambda limit: limit.seconds)
    assert limits_of(
        "rollout.startup_timeout=200",
        "rollout.stall_timeout=30",
        f"train.hang_timeout={hang_timeout}",
    ) == Limits(Limit(215, "rollout.startup_timeout"), step, push)


def test_a_step_on_gpus_may_take_longer_unless_the_config_says():
    assert limits_of().step == Limit(45, "train.hang_timeout")
    assert limits_of(on_gpu=True).step == Limit(300, "train.hang_timeout")
    assert limits_of("train.hang_timeout=7", on_gpu=True).step.seconds == 7


def test_limits_are_those_of_the_docs():
    text = Path("docs/cluster.md").read_text()
    seconds = f"`rollout.stall_timeout` + {TIMEOUT.total_seconds() + MARGIN_SECONDS:g}, or"
    assert f"| a push of weights, and its checksums | {seconds} `train.hang_timeout` if" in text
    assert f"| engines start | `rollout.startup_timeout` + {MARGIN_SECONDS:g} |" in text
    assert "| a generation | unlimited, but an engine" in text


UNLIMITED = ["load", "generate", "score", "save", "log", "close", "sleep"]
UNLIMITED += ["eval_generate", "eval_score", "eval_log"]


def test_phases_with_time_outs_of_their_own_have_no_limit():
    for phase in (*UNLIMITED, *(f"wait_rollout_{phase}" for phase in UNLIMITED)):
        for is_first_step in (False, True):
            assert limits_of().for_phase(phase, is_first_step=is_first_step) is None
