"""A fault of one of four real ranks ends them all soon and is reported once, with its cause."""

import ctypes
import errno
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.runs.stopped import stop_for
from helpers.runs.watched import INTERVALS, LIMITS, World, watched_ranks
from megatron_grpo.engines.http import EngineError
from megatron_grpo.hooks import HookError
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.process import Preempted
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.watchdog import Watchdog
from megatron_grpo.watchdog.watchdog import _failure, server_host
from parallel.collectives import any_rank


@pytest.fixture
def ranks(tmp_path):
    """Start four ranks that run a function of this module."""

    def start(fn, *args, world_size=4):
        return watched_ranks(world_size, tmp_path, fn, *args)

    return start


def ready(folder: Path, rank: int) -> None:
    (folder / f"ready_{rank}").touch()


ALL_READY = [f"ready_{rank}" for rank in range(4)]


def reduce_forever(watchdog: Watchdog, rank: int, folder: Path) -> None:
    watchdog.begin_step(3)
    watchdog.enter("generate")
    ready(folder, rank)
    while True:
        dist.all_reduce(torch.zeros(1))


def printed(world: World) -> list[str]:
    """The terminal output of all ranks, without what gloo logs when a rank that it connects to is
    gone."""
    lines = [line for rank in range(4) for line in world.output(rank).splitlines()]
    return [line for line in lines if line and "gloo/transport/tcp/debug_logger.cc" not in line]


def test_ranks_leave_together_when_all_have_finished(ranks):
    with ranks(finish_one_after_the_other) as world:
        assert world.exit_codes(60) == [0, 0, 0, 0]
    assert printed(world) == []


def finish_one_after_the_other(watchdog: Watchdog, rank: int, folder: Path) -> None:
    watchdog.enter("close")
    dist.barrier()
    time.sleep(0.5 * rank)


@pytest.mark.parametrize(("victim", "teller"), [(2, 0), (0, 1)])
def test_death_of_a_rank_ends_all_and_is_printed_once(ranks, victim, teller):
    with ranks(reduce_forever) as world:
        world.wait_for(*ALL_READY)
        time.sleep(0.5)  # a beat
        world.kill(victim, signal.SIGKILL)
        assert world.exit_codes(60) == [-9 if rank == victim else 1 for rank in range(4)]
    [line] = printed(world)
    assert line.startswith(f"megatron-grpo: rank {victim} on ") and line in world.output(teller)
    assert line.endswith("died in phase generate of step 3")


def test_crash_is_reported_with_its_stack(ranks):
    with ranks(crash) as world:
        assert world.exit_codes(60) == [1, 1, -11, 1]
    output = world.output(0)
    assert "rank 2 on " in output and "died in phase train of step 1" in output
    assert "Segmentation fault" in output and "in crash" in output


def crash(watchdog: Watchdog, rank: int, folder: Path) -> None:
    watchdog.begin_step(1)
    watchdog.enter("train")
    if rank == 2:
        time.sleep(0.5)
        ctypes.string_at(0)
    dist.barrier()


def test_mistake_before_the_first_step_is_one_line_and_exit_code_2(ranks):
    with ranks(mistake) as world:
        assert world.exit_codes(60) == [2, 2, 2, 2]
    assert printed(world) == ["megatron-grpo: lower it"] and world.output(0)
    assert "rank 3 on " in world.stacks and "in mistake" in world.stacks


def mistake(watchdog: Watchdog, rank: int, folder: Path) -> None:
    if rank == 3:
        time.sleep(0.3)
        raise ValueError("lower it")
    dist.barrier()


REPORTS = [  # of an error in a step: whether one line says all, and whether the user must fix it
    (0, ValueError("lower it"), True, True),
    (0, PermissionError(13, "may not"), True, True),
    (0, ModuleNotFoundError("No module named 'wandb'"), True, True),
    (0, OSError(errno.ESTALE, "Stale file handle"), True, False),
    (0, KeyError("a bug"), False, False),
    (7, ValueError("what some library does not take"), False, False),
    (7, PermissionError(13, "may not"), False, False),
    (7, RewardError("reward function f on prompt 3: it raised"), True, False),
    (7, HookError("on_step_end of train.hooks mine.py:Stop, after step 6: it raised"), True, False),
    (7, EngineError("rollout engine http://a refuses"), True, False),
    (7, TimeoutError("rollout engine http://a did not answer"), True, False),
    (7, OSError("step_3 cannot be written"), True, False),
]


@pytest.mark.parametrize(("step", "error", "is_one_line", "is_for_user"), REPORTS)
def test_report_of_an_exception(step, error, is_one_line, is_for_user):
    failure = _failure(error, step)
    if is_one_line:
        assert failure.text == str(error) and type(error).__name__ in failure.trace
    else:
        assert type(error).__name__ in failure.text and not failure.trace
    assert failure.is_for_user == is_for_user


def test_broken_collectives_are_not_reported_but_their_cause(ranks):
    with ranks(break_collective) as world:
        assert world.exit_codes(60) == [1, 1, 1, 1]
    assert printed(world)[-1] == "KeyError: 'why'"


def break_collective(watchdog: Watchdog, rank: int, folder: Path) -> None:
    if rank == 2:
        dist.destroy_process_group()
        time.sleep(0.2)  # the others have raised by now
        raise KeyError("why")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_rank_is_named_and_killed(ranks, victim):
    with ranks(reduce_forever) as world:
        world.wait_for(*ALL_READY)
        time.sleep(0.5)
        world.kill(victim, signal.SIGSTOP)
        assert world.exit_codes(60) == [-9 if rank == victim else 1 for rank in range(4)]
    [line] = printed(world)
    assert line.startswith(f"megatron-grpo: rank {victim} ")
    assert "in phase generate of step 3" in line and "has not answered for 3 s" in line


def skip_a_collective() -> None:
    dist.all_gather([torch.zeros(1) for _ in range(4)], torch.zeros(1))


def loop_forever() -> None:
    while True:
        pass


def hang(watchdog: Watchdog, rank: int, folder: Path, way: Callable[[], None]) -> None:
    for step in (1, 2):
        watchdog.begin_step(step)
        watchdog.enter("train")
        dist.barrier()
        time.sleep(0.5)
    if rank == 2:
        way()
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(("way", "seconds"), [(skip_a_collective, 1.5), (loop_forever, 6)])
def test_hanging_rank_is_named_with_where_it_is(ranks, way, seconds):
    with ranks(hang, way) as world:
        assert world.exit_codes(60) == [1, 1, 1, 1]
    output = "\n".join(printed(world))
    assert output.startswith("megatron-grpo: no rank has made progress for ")
    # A rank that uses the CPU may compute.
    assert f"for {seconds} s (train.hang_timeout)" in output
    assert "stragglers, 1 of 4 ranks:\nrank 2 on " in output
    assert "phase train of step 2" in output and f"in {way.__name__}" in output
    assert "rank 3" not in output and world.output(0)
    assert world.stacks.count("in hang") == 4
    assert 'File "' not in output


def test_time_in_which_all_are_stopped_does_not_count(ranks):
    """As by `scontrol suspend`, longer than every limit, and with whatever they have started."""
    with ranks(reduce_until_stopped) as world:
        world.wait_for(*ALL_READY)
        time.sleep(0.5)
        stop_for(INTERVALS.kill + 1, *(rank.pid for rank in world.processes))
        time.sleep(1)
        (world.folder / "stop").touch()
        assert world.exit_codes(60) == [0, 0, 0, 0]
    assert printed(world) == []


def reduce_until_stopped(watchdog: Watchdog, rank: int, folder: Path) -> None:
    watchdog.begin_step(3)
    watchdog.enter("train")
    ready(folder, rank)
    while not any_rank((folder / "stop").exists()):
        watchdog.tick()


def test_microbatches_within_the_limit_are_no_hang(ranks):
    with ranks(tick_for_longer_than_the_limit, world_size=1) as world:
        assert world.exit_codes(60) == [0]
    assert world.output(0) == ""


def tick_for_longer_than_the_limit(watchdog: Watchdog, rank: int, folder: Path) -> None:
    for step in (1, 2):  # the first has more time
        watchdog.begin_step(step)
        watchdog.enter("train")
        time.sleep(0.5)
    end = time.monotonic() + 1.5 * LIMITS.step.seconds
    while time.monotonic() < end:
        time.sleep(0.1)
        watchdog.tick()


def test_rank_that_never_releases_the_gil_is_named_with_its_stack(ranks):
    with ranks(hold_the_gil) as world:
        assert world.exit_codes(60) == [1, 1, -9, 1]
    output = "\n".join(printed(world))
    assert "rank 2 on " in output and "has not answered for 3 s" in output
    assert "in hold_the_gil" in output


def hold_the_gil(watchdog: Watchdog, rank: int, folder: Path) -> None:
    watchdog.enter("generate")
    if rank == 2:
        ctypes.PyDLL(None).sleep(100)
    dist.barrier()


def test_signal_to_one_rank_stops_all_at_the_same_step(ranks):
    with ranks(train_until_preempted) as world:
        world.wait_for(*ALL_READY)
        world.kill(3, signal.SIGTERM)
        world.wait_for("saving_0")
        for rank in range(4):
            world.kill(rank, signal.SIGUSR1)  # once more, during the save
        (world.folder / "signalled again").touch()
        assert world.exit_codes(60) == [75] * 4
    [line] = printed(world)
    step = (world.folder / "saved_0").read_text()
    assert line == f"megatron-grpo: preempted: step {step} saved" and world.output(0)
    assert {(world.folder / f"saved_{rank}").read_text() for rank in range(4)} == {step}
    assert all((world.folder / f"signalled_{rank}").exists() for rank in range(4))


def train_until_preempted(watchdog: Watchdog, rank: int, folder: Path) -> None:
    step = 1
    watchdog.on_preempt((folder / f"signalled_{rank}").touch)
    while True:
        watchdog.begin_step(step)
        if any_rank(watchdog.is_preempted):
            break
        if step == 5:
            ready(folder, rank)
        step += 1
    watchdog.enter("save")
    (folder / f"saving_{rank}").touch()
    while not (folder / "signalled again").exists():
        time.sleep(0.01)
    (folder / f"saved_{rank}").write_text(str(step))
    raise Preempted(f"preempted: step {step} saved")


def test_signal_reaches_a_rank_that_waits_in_a_collective(ranks):
    with ranks(wait_for_rank_0) as world:
        world.wait_for(*ALL_READY)
        world.kill(2, signal.SIGTERM)
        assert world.exit_codes(60) == [0, 0, 0, 0]


def wait_for_rank_0(watchdog: Watchdog, rank: int, folder: Path) -> None:
    """Rank 0 is let go by the signal that only rank 2 gets."""
    watchdog.begin_step(1)
    watchdog.enter("generate")
    ready(folder, rank)
    while rank == 0 and not watchdog.is_preempted:
        time.sleep(0.01)
    dist.barrier()


@pytest.mark.parametrize("interrupts_are_ignored", [False, True])
def test_signal_before_the_first_step_ends_all(ranks, interrupts_are_ignored):
    """As in a job that was started by `nohup` or behind a script's `&`."""
    with ranks(start_slowly, interrupts_are_ignored) as world:
        world.wait_for(*ALL_READY)
        if interrupts_are_ignored:
            world.kill(1, signal.SIGINT)
        world.kill(1, signal.SIGTERM)
        assert world.exit_codes(60) == [75] * 4
    assert printed(world) == [
        "megatron-grpo: preempted before the first step; the same command resumes"
    ]
    assert (world.folder / "closed").exists()  # rank 0 may close what it owns


def start_slowly(watchdog: Watchdog, rank: int, folder: Path, interrupts_are_ignored: bool) -> None:
    if interrupts_are_ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready(folder, rank)
    try:
        time.sleep(100)
    finally:
        if rank == 0:
            (folder / "closed").touch()


def test_sigint_to_any_rank_ends_all(ranks):
    with ranks(reduce_forever) as world:
        world.wait_for(*ALL_READY)
        world.kill(1, signal.SIGINT)
        assert world.exit_codes(60) == [130] * 4
    assert printed(world) == [
        "megatron-grpo: interrupted: run the same command to begin from the start"
    ]


def test_server_host_of_one_host_is_loopback():
    assert server_host(RankPlace(0, 0, 2, num_hosts=1), dist.HashStore()) == "127.0.0.1"


def test_server_host_is_where_the_last_rank_finds_rank_0(monkeypatch):
    """On rank 0's own host its name may stand for loopback."""
    monkeypatch.setenv("MASTER_ADDR", "head")
    store, found = dist.HashStore(), []
    store.set_timeout(timedelta(seconds=5))
    for rank, address in ((1, "10.0.0.5"), (0, "127.0.1.1")):
        known = {"head": address}.__getitem__
        monkeypatch.setattr("megatron_grpo.watchdog.watchdog.address_of", known)
        found.append(server_host(RankPlace(rank, 0, 2, num_hosts=2), store))
    assert found == ["10.0.0.5", "10.0.0.5"]
