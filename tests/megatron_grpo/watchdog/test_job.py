"""What rank 0 concludes from the events it receives, without ranks, sockets or waiting."""

import pytest

from megatron_grpo.watchdog.job import (
    End,
    Failure,
    Job,
    Limit,
    Limits,
    Pace,
    Position,
    stragglers,
)

PACE = Pace(silence=20, settle=0.5, stacks=2)
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
    found = Job(world_size, LIMITS, PACE, 0.0)
    for rank in range(joined):
        found.join(rank, f"node{rank // 2}", 100 + rank, 0.0)
    all_at(found, Position(1, phase), 0.0)
    all_at(found, Position(step, phase), 0.0)
    return found


def all_at(found: Job, position: Position, now: float) -> None:
    for rank in found.members:
        found.beat(rank, position, now)


def beats_until(found: Job, seconds: int) -> None:
    """Send heartbeats without progress, on which the job must not end."""
    for now in range(seconds):
        for rank, member in found.members.items():
            found.beat(rank, member.position, now)
        assert not found.wants_stacks(now) and found.end(now) is None, now


def test_a_death_is_told_with_rank_host_and_place_after_a_moment():
    found = job(step=7, phase="train")
    found.lost(3, 10.0)
    assert found.end(10.4) is None
    assert found.end(10.5) == End(
        1, "megatron-grpo: rank 3 on node1 (pid 103) died in phase train of step 7"
    )


def test_what_only_follows_from_another_failure_is_not_the_cause():
    found = job(step=7, phase="train")
    found.failed(0, Failure("gloo: closed by peer", is_consequence=True), 10.0)
    found.failed(1, Failure("link to rank 3 lost", "Traceback", is_consequence=True), 10.1)
    found.lost(3, 10.3)
    found.failed(2, Failure("KeyError"), 10.4)
    end = found.end(10.5)
    assert end is not None and "rank 3 on node1 (pid 103) died" in end.text


def test_the_end_of_a_rank_that_has_told_why_is_no_death():
    found = job()
    found.failed(2, Failure("lower it", "Traceback", is_for_user=True), 1.0)
    found.lost(2, 1.1)
    place = "rank 2 on node1 (pid 102) failed in phase start"
    assert found.end(2.0) == End(2, "megatron-grpo: lower it", f"{place}:\nTraceback\n")


def test_all_leave_when_the_last_is_done():
    found = job()
    for rank in (1, 2, 3, 0):
        assert found.end(1.0) is None
        found.leaves(rank, End(75, "saved"), 1.0)
    assert found.end(1.0) == End(75, "saved")


def test_a_rank_without_signs_of_life_is_named():
    found = job(step=2, phase="save")
    for now in range(1, 20):
        for rank in (0, 1, 3):
            found.beat(rank, Position(2, "save"), now)
        assert found.end(now) is None
    end = found.end(20.0)
    assert end is not None and end.code == 1
    assert "rank 2 on node1 (pid 102), in phase save of step 2, has not answered" in end.text


@pytest.mark.parametrize(
    ("step", "phase", "seconds"),
    [(2, "train", 45), (2, "", 45), (2, "push", 75), (1, "train", 300)],
)
def test_how_long_nothing_may_move_depends_on_where_rank_0_is(step, phase, seconds):
    found = job(step=step, phase=phase)
    beats_until(found, seconds)
    assert found.wants_stacks(seconds)


@pytest.mark.parametrize(
    ("step", "phase"), [(0, "load"), (2, "generate"), (2, "score"), (2, "save")]
)
def test_files_engines_and_rewards_may_take_their_time(step, phase):
    beats_until(job(step=step, phase=phase), 10_000)


def test_a_microbatch_on_one_rank_is_progress_of_all():
    found = job(step=2, phase="train")
    beats_until(found, 44)
    found.beat(3, Position(2, "train", num_ticks=1), 44.0)
    assert not found.wants_stacks(88.0)
    assert found.wants_stacks(89.0)


def test_a_hang_is_told_with_the_stack_of_the_rank_that_is_not_where_the_others_are():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0) and not found.wants_stacks(45.1)
    for rank in (0, 1, 3):
        found.members[rank].stack = WAITING
    assert found.end(46.0) is None
    found.members[2].stack = BUSY
    end = found.end(46.1)
    assert end is not None and end.code == 1
    assert end.text.splitlines() == [
        "megatron-grpo: no rank has made progress for 45 s (train.hang_timeout); rank 0 is in "
        "phase train of step 2",
        "1 of 4 ranks are not where the others are:",
        "rank 2 on node1 (pid 102), phase train of step 2:",
        BUSY,
    ]
    assert end.stacks.count(WAITING) == 3 and BUSY in end.stacks


def test_a_rank_that_does_not_tell_its_stack_is_the_one():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0)
    for rank in (0, 1, 2):
        found.members[rank].stack = WAITING
    assert found.end(46.9) is None
    end = found.end(47.0)
    assert (
        end is not None
        and "rank 3 on node1 (pid 103), phase train of step 2:\nit did not" in end.text
    )


def test_progress_while_stacks_are_told_ends_nothing():
    found = job(step=2, phase="train")
    beats_until(found, 45)
    assert found.wants_stacks(45.0)
    all_at(found, Position(2, "train", num_ticks=1), 46.0)
    assert found.end(47.0) is None


def test_ranks_that_never_come_are_named():
    found = job(joined=2)
    beats_until(found, 300)
    assert found.wants_stacks(300.0)
    end = found.end(302.0)
    assert end is not None and "never joined the job: rank 2, 3" in end.text


def test_who_is_not_in_a_collective_while_most_are_is_the_odd_one():
    """Also where pipeline stages wait in different places, and later stages are behind."""
    stacks = {0: BUSY, 1: WAITING, 2: RECEIVING, 3: RECEIVING}
    assert stragglers(stacks, {0: (2, 3), 1: (2, 3), 2: (2, 1), 3: (2, 1)}) == [0]


def test_else_those_behind_are():
    stacks = {0: WAITING, 1: WAITING, 2: WAITING, 3: WAITING}
    assert stragglers(stacks, {0: (2, 3), 1: (2, 3), 2: (2, 2), 3: (2, 3)}) == [2]


def test_else_those_elsewhere_are():
    """One has skipped a collective and waits in the next."""
    stacks = {0: WAITING, 1: WAITING, 2: RECEIVING, 3: WAITING}
    assert stragglers(stacks, dict.fromkeys(range(4), (2, 3))) == [2]


def test_ranks_that_wait_alike_are_not_told_apart():
    assert stragglers(dict.fromkeys(range(4), WAITING), dict.fromkeys(range(4), (2, 3))) == []
