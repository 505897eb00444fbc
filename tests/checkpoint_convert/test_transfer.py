"""Copies by worker processes: one read per value, the first failure, no worker left behind."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.transfer import _start_worker, add_bytes, run_tasks
from checkpoint_convert.verify import verify_weights
from helpers.engines.live import wait_until
from helpers.models.conversions import num_bytes_read, variant
from helpers.models.tiny import tiny_model
from helpers.ranks.processes import CONTEXT
from parallel import ParallelDims

FORK = multiprocessing.get_context("fork")


def alive(folder):
    """Running workers among those that wrote their process ids into `folder`."""
    pids = [file.read_text() for file in folder.iterdir()]
    return [pid for pid in pids if pid and psutil.pid_exists(int(pid))]


def test_import_refuses_weights_beyond_a_dtype(tmp_path):
    def enlarge(weights):
        weights["model.norm.weight"][3] = 1e5

    large = variant(tiny_model(tmp_path / "model", "llama"), tmp_path / "large", enlarge)
    with pytest.raises(ValueError, match=r"final_layernorm.* that F16 cannot hold"):
        import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype="F16")
    assert not (tmp_path / "out").exists()
    import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype="BF16")


def test_import_reads_rows_once_for_all_ranks(tmp_path, monkeypatch):
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    model = tiny_model(tmp_path / "model", "llama", **wide)
    source = model / "model.safetensors"
    monkeypatch.setattr("checkpoint_convert.transfer.PART_BYTES", 1 << 16)
    monkeypatch.setattr(
        "checkpoint_convert.transfer.run_tasks", lambda task, shares, *_: list(map(task, shares))
    )
    before = num_bytes_read()
    import_checkpoint(model, tmp_path / "out", ParallelDims(tensor=8))
    num_bytes = num_bytes_read() - before
    assert source.stat().st_size > 7e6
    assert 0 <= num_bytes - source.stat().st_size < 500_000  # the config is read too
    monkeypatch.undo()
    assert verify_weights(model, tmp_path / "out") == []


# Worker processes.


@pytest.mark.parametrize("num_workers", [1, 2, 100])
def test_run_tasks_keeps_the_order_of_items(num_workers):
    def slower_first(item):
        time.sleep(0.02 * (5 - item))
        return item * 10

    assert run_tasks(slower_first, range(5), num_workers) == [0, 10, 20, 30, 40]


def look_around():
    large, here = list(range(10)), os.getpid()

    def look(item):
        return large[item], os.getpid() == here, len(os.listdir("/proc/self/task"))

    return run_tasks(look, range(10), 3)


def test_run_tasks_shares_memory_with_its_workers():
    # In a fresh process: modules that other tests have imported here start threads after a fork.
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        found = pool.submit(look_around).result(timeout=60)
    assert found == [(number, False, 1) for number in range(10)]


def test_add_bytes_reports_progress_of_all_workers():
    reported = []

    def work(item):
        for _ in range(5):
            time.sleep(0.02)
            add_bytes(item)

    run_tasks(work, [1, 10, 100, 1000], 2, reported.append)
    assert reported == sorted(reported)
    assert reported[-1] == 5 * 1111


def test_run_tasks_raises_the_first_failure(tmp_path):
    def fail(item):
        (tmp_path / str(item)).touch()
        if item == 1:
            raise ValueError(f"item {item} of {tmp_path}")
        time.sleep(0.5)

    before = {*psutil.Process().children()}
    with pytest.raises(ValueError, match=f"item 1 of {tmp_path}"):
        run_tasks(fail, range(100), 2)
    assert len(list(tmp_path.iterdir())) < 20
    assert {*psutil.Process().children()} <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_run_tasks_ends_where_a_worker_is_killed(tmp_path, number):
    def work(item):
        (tmp_path / f"{item}").write_text(str(os.getpid()))
        if item == 0:
            assert wait_until((tmp_path / "1").exists, 30)
            os.kill(os.getpid(), number)
        time.sleep(100)

    before = time.monotonic()
    with pytest.raises(BrokenProcessPool):
        run_tasks(work, range(4), 2)
    assert time.monotonic() - before < 60
    assert len(list(tmp_path.iterdir())) == 2
    assert not alive(tmp_path)


def lose_a_worker_that_waits(folder):
    def stop(signum, frame):
        raise SystemExit(3)

    def work(item):
        (folder / f"{item}").write_text(str(os.getpid()))
        if item == 1:
            assert wait_until((folder / "0").exists, 30)
            time.sleep(0.5)  # the other waits for a third item and holds the queue's lock
            os.kill(int((folder / "0").read_text()), signal.SIGKILL)
            time.sleep(100)

    signal.signal(signal.SIGTERM, stop)
    run_tasks(work, range(2), 2)


def test_run_tasks_ignores_handlers_of_the_caller(tmp_path):
    """Otherwise a worker that gets SIGTERM after another was killed would run the caller's handler
    and report a failed task."""
    process = FORK.Process(target=lose_a_worker_that_waits, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 1, "still waiting for a worker"
    assert not alive(tmp_path)


def test_run_tasks_leaves_ctrl_c_to_the_caller(tmp_path):
    def work(item):
        (tmp_path / f"{item}").write_text(str(os.getpid()))
        if item == 1:
            assert wait_until((tmp_path / "0").exists, 30)
            time.sleep(0.3)  # until the other waits for an item
            for waiting_or_busy in ("0", "1"):
                os.kill(int((tmp_path / waiting_or_busy).read_text()), signal.SIGINT)
            time.sleep(0.3)
        return item

    assert run_tasks(work, range(2), 2) == [0, 1]


def sleep_for_long(folder):
    def work(item):
        (folder / f"{item}").write_text(str(os.getpid()))
        time.sleep(100)

    run_tasks(work, range(2), 2)


def test_run_tasks_dies_with_its_caller(tmp_path):
    process = FORK.Process(target=sleep_for_long, args=(tmp_path,))
    process.start()
    assert wait_until(lambda: len(alive(tmp_path)) == 2, 30)
    process.kill()
    process.join()
    assert wait_until(lambda: not alive(tmp_path), 30)


@pytest.mark.parametrize(("is_alive", "exit_code"), [(True, 0), (False, 1)])
def test_start_worker_ends_where_the_caller_is_gone(is_alive, exit_code):
    gone = FORK.Process()
    gone.start()
    gone.join()
    caller = os.getpid() if is_alive else gone.pid
    worker = FORK.Process(target=_start_worker, args=(str, FORK.Value("q", 0), caller))
    worker.start()
    worker.join()
    assert worker.exitcode == exit_code
