"""Environments in real processes: many at once, and failing ones."""

import os
import signal
import time

import psutil
import pytest

from helpers.engines.live import wait_until
from helpers.runs.environments import environment_pool, sleepers
from helpers.runs.stopped import stop_for
from megatron_grpo.agents.fork_pool import ForkPool, InstanceFailed, InstancesLost
from megatron_grpo.config.reward import EnvironmentConfig

pytestmark = pytest.mark.waits

SECONDS = 20
SEED = 7


def processes_of(pool) -> list[psutil.Process]:
    return psutil.Process(pool._worker.pid).children(recursive=True)


def begun(pool, seed: int = SEED, **row):
    """An instance after its reset, and its first observation."""
    instance = pool.new_instance()
    return instance, instance.begin("prompt", row, seed).result(SECONDS)


def odd(pool, deed: str, turn: int = 1):
    """An instance after its reset that does `deed` in `turn`."""
    return begun(pool, deed=deed, turn=turn)[0]


@pytest.fixture(scope="module")
def odd_pool(tmp_path_factory):
    """A pool of class Odd, shared by all faults that affect one instance only."""
    folder = tmp_path_factory.mktemp("odd")
    with environment_pool(folder, "Odd", memory_megabytes=512, timeout=4.0) as pool:
        yield pool


def is_alone(pool) -> bool:
    """Whether only the worker process is left."""
    return wait_until(lambda: len(processes_of(pool)) == 1, SECONDS)


def test_begin_gives_each_instance_its_own_state(tmp_path):
    with environment_pool(tmp_path, "Echo", arguments={"last": 2}) as pool:
        first, observation = begun(pool, first="hello", other=1)
        assert observation == "hello"
        second, observation = begun(pool, prompt="a column")
        assert observation is None
        assert first.step("abc").result(SECONDS) == ["1: abc", 3.0, False]
        assert first.step("ąbc\n").result(SECONDS) == ["2: ąbc\n", 4.0, True]
        assert second.step("").result(SECONDS) == ["1: ", 0.0, False]


def test_step_of_many_runs_at_once(tmp_path):
    with environment_pool(tmp_path, "Slow", arguments={"seconds": 2.0}) as pool:
        instances = [pool.new_instance() for _ in range(20)]
        for future in [instance.begin("prompt", {}, SEED) for instance in instances]:
            future.result(SECONDS)
        start = time.monotonic()
        for future in [instance.step("x") for instance in instances]:
            assert future.result(SECONDS) == ["1: x", 1.0, False]
        assert time.monotonic() - start < 20 * 2.0 / 4
        assert len(processes_of(pool)) == 21
        for instance in instances:
            instance.end()
        assert is_alone(pool)


def test_step_is_not_late_by_time_in_which_all_stopped(tmp_path):
    with environment_pool(tmp_path, "Slow", arguments={"seconds": 1.0}, timeout=3.0) as pool:
        step = begun(pool)[0].step("x")
        time.sleep(0.2)  # the step has begun
        stop_for(4.0, pool._worker.pid)
        assert step.result(SECONDS) == ["1: x", 1.0, False]


def test_begin_seeds_random_numbers(tmp_path):
    with environment_pool(tmp_path, "Dice") as pool:

        def throws(seed: int) -> list[str]:
            instance, first = begun(pool, seed)
            return [*first.split(), *instance.step("x").result(SECONDS)[0].split()]

        assert throws(1) == throws(1)
        assert len({number for seed in range(5) for number in throws(seed)}) == 20


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("fail", "ZeroDivisionError"),
        ("refuse", r"mine.py\", line \d+, in (.|\n)*ValueError: cannot do this$"),
        ("die", "signal SIGKILL"),
        ("leave_politely", "SystemExit: enough"),
        ("hang_up", "closed the connection"),
        ("allocate", "more memory than environment.memory_megabytes 512"),
        ("nothing", "step returned None instead of"),
        ("number", "the observation 7: not a text"),
        ("nan", "the reward nan: not a finite number"),
        ("unsure", "done = None: neither true nor false"),
        ("endless", "2097152 characters: at most 1048576"),
    ],
)
def test_step_that_fails_raises_and_others_go_on(odd_pool, deed, error):
    other, bad = odd(odd_pool, "go_on"), odd(odd_pool, deed)
    with pytest.raises(InstanceFailed, match=error):
        bad.step("x").result(SECONDS)
    assert other.step("x").result(SECONDS) == ["go on", 0.0, False]
    other.end()
    assert is_alone(odd_pool)


def test_begin_that_fails_is_reported_once(tmp_path, capfd):
    with environment_pool(tmp_path, "Odd") as pool:
        row = {"deed": "fail", "turn": 0}  # 16 at once: some would live to print
        for call in [pool.new_instance().begin("prompt", row, SEED) for _ in range(16)]:
            with pytest.raises(InstanceFailed, match=r"^Traceback .*\n  File \".*mine.py"):
                call.result(SECONDS)
        assert is_alone(pool)
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_step_that_is_late_is_killed_with_all_it_started(odd_pool):
    other, at_reset = odd(odd_pool, "go_on"), odd_pool.new_instance()
    late = [odd(odd_pool, deed).step("x") for deed in ("hang", "run_away", "spin")]
    late.append(at_reset.begin("prompt", {"deed": "hang", "turn": 0}, SEED))
    assert other.step("x").result(3) == ["go on", 0.0, False]
    for call in late:
        with pytest.raises(InstanceFailed, match=r"no answer after 4 s \(environment.timeout\)"):
            call.result(SECONDS)
    assert other.step("x").result(SECONDS) == ["2: x", 1.0, False]
    other.end()
    assert wait_until(lambda: not sleepers(), SECONDS) and is_alone(odd_pool)


def test_step_after_a_death_fails(odd_pool):
    instance = odd(odd_pool, "pid")
    os.kill(int(instance.step("x").result(SECONDS)[0]), signal.SIGKILL)
    assert is_alone(odd_pool)
    with pytest.raises(InstanceFailed, match="signal SIGKILL"):
        instance.step("x").result(SECONDS)


def test_step_that_is_not_read_holds_up_no_other(tmp_path):
    long = "x" * (1 << 21)  # more than a pipe's buffer
    with environment_pool(tmp_path, "Odd") as pool:
        other, stopped = odd(pool, "go_on"), odd(pool, "pid")
        os.kill(int(stopped.step("x").result(SECONDS)[0]), signal.SIGSTOP)
        assert wait_until(lambda: any(p.status() == "stopped" for p in processes_of(pool)), SECONDS)
        late, well = stopped.step(long), other.step(long)
        with pytest.raises(InstanceFailed, match=r"did not read the turn within 1\.5 s"):
            late.result(SECONDS)
        assert well.result(SECONDS) == ["go on", 0.0, False]


def test_step_is_not_answered_by_a_fork(odd_pool):
    instance = odd(odd_pool, "fork")
    assert instance.step("x").result(SECONDS) == ["the instance", 1.0, False]
    assert instance.step("y").result(SECONDS) == ["2: y", 1.0, False]
    instance.end()


def test_close_leaves_nothing(tmp_path):
    with environment_pool(tmp_path, "Odd") as pool:
        hanging = odd(pool, "hang").step("x")
        assert wait_until(sleepers, SECONDS)
        left = processes_of(pool)
    with pytest.raises(InstancesLost, match="died with exit code 0"):
        hanging.result(SECONDS)
    assert not sleepers()
    assert not any(p.is_running() for p in left)


def test_step_fails_when_the_worker_dies(tmp_path):
    with environment_pool(tmp_path, "Odd") as pool:
        other, call = odd(pool, "go_on"), odd(pool, "hang").step("x")
        [worker] = psutil.Process(pool._worker.pid).children()
        os.kill(worker.pid, signal.SIGKILL)
        for waiting in (call, other.step("y")):
            with pytest.raises(InstancesLost, match="died with signal SIGKILL"):
                waiting.result(SECONDS)
        assert not sleepers()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Missing", "has no class 'Missing'"),
        ("Halved", "has no method step"),
        ("Demanding", "step of .* 'colour': besides .* token_ids, finish_reason, tokens_left"),
        ("Rigid", "environment.arguments {} of .*: missing a required argument: 'size'"),
        ("Curious", "'colour': 1 of 2 rows have no such column; the first of them has prompt"),
    ],
)
def test_wait_ready_refuses_an_unusable_class(tmp_path, name, error):
    with (
        environment_pool(tmp_path, name) as pool,
        pytest.raises(ValueError, match=error),
    ):
        pool.wait_ready([{"prompt": "a", "colour": "red"}, {"prompt": "b"}])


def test_wait_ready_kills_a_file_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_grpo.workers.supervised.LOAD_SECONDS", 1.0)
    file = tmp_path / "stuck.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    pool = ForkPool(EnvironmentConfig(name=f"{file}:Any", timeout=1.0))
    with pytest.raises(ValueError, match="not loaded after 1 s"):
        pool.wait_ready([])
