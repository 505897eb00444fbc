import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.engines.live import wait_until
from helpers.ranks.processes import is_alive
from helpers.runs.rewards import sample_of
from helpers.runs.stopped import stop_for
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.pool import RewardPool, RewardWorkerProcess, ScoringCancelled
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.workers import supervised

TESTS = Path(__file__).parents[2]
REPOSITORY = TESTS.parent
LONG_SLEEP = str(10_000_000 + os.getpid())  # seconds, so that the process can be recognised
NAP = 2.0
MINE = """
import asyncio, ctypes, math, os, re, signal, subprocess, sys, time
def length(completions, **_): return [len(c) for c in completions]
def bonus(completions, bonus, **_): return bonus
def group(completions, **_): return [len("".join(completions))] * len(completions)
def pid(completions, **_): return [os.getpid()] * len(completions)
def has_torch(completions, **_): return ["torch" in sys.modules] * len(completions)
def nap(completions, **_):
    start = time.monotonic(); print("begun", flush=True); time.sleep(NAP)
    return [start] * len(completions)
async def doze(completions, **_):
    print("begun", flush=True); await asyncio.sleep(NAP)
    return [1] * len(completions)
def hang(completions, prompts, **_):
    while prompts[0] == "prompt 2": subprocess.run(["sleep", "LONG_SLEEP"])
    return [0] * len(completions)
def fail(completions, **_): return [1 / 0 for _ in completions]
def messages(completions, **_): return [each[0]["content"] for each in completions]
def die(completions, **_): os.kill(os.getpid(), signal.SIGKILL)
def leave(completions, **_): os._exit(3)
def interrupt(completions, **_): raise KeyboardInterrupt
def crash(completions, **_): ctypes.string_at(0)
def hang_up(completions, **_):
    os.closerange(3, 100)
    while True: time.sleep(1)
def allocate(completions, **_): return [len(bytearray(1 << 40))] * len(completions)
def hoard(completions, **_):
    hoarded = []
    while True: hoarded.append(bytes(1 << 20))  # whose pages nobody touches
def fork(completions, bonus, **_):
    if os.fork() == 0: eval(bonus[0]); return [9]
    os.wait()
    return [1] * len(completions)
async def fork_async(completions, bonus, **_): return fork(completions, bonus)
def gossip(completions, **_):
    for _ in range(16): print("x" * (1 << 22))
    return [1] * len(completions)
def litter(completions, bonus, **_):
    # Leave a process in a session of its own whose parents have ended, then do as `bonus` says.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: os.execlp("sleep", "sleep", "LONG_SLEEP")
        os._exit(0)
    os.wait()
    {"return": lambda: None, "die": os.abort, "hang": lambda: time.sleep(1000)}[bonus[0]]()
    return [0] * len(completions)
def stuck(completions, bonus, **_):
    litter(completions, ["return"])
    with open(bonus[0], "w") as file: file.write(f"{os.getpid()}\\n")
    while True: time.sleep(1)
def given(completions, completion_ids, finish_reasons, reward_timeout, **columns):
    assert finish_reasons == ["stop"] * len(completions) and "reward_timeout" not in columns
    return [sum(ids) + reward_timeout for ids in completion_ids]
def one_of_many(completions, prompts, bonus, **_):
    # Do what `bonus` says about the prompt 2, and score the others.
    if prompts[0] == "prompt 2": eval(bonus[0].get("one_of_many", "0"))
    return [os.getpid()] * len(completions)
def run_a_loop(completions, **_): return asyncio.run(anext_to(completions))
async def anext_to(completions): return [len(c) for c in completions]
running = peak = 0
async def counted(completions, **_):
    global running, peak
    running += 1; peak = max(peak, running)
    await asyncio.sleep(0.1)
    while peak < 8: await asyncio.sleep(0.01)
    running -= 1
    return [peak] * len(completions)
async def late(completions, prompts, **_):
    await asyncio.sleep(1000 if prompts[0] == "prompt 2" else 0.1)
    return [os.getpid()] * len(completions)
async def blocking(completions, prompts, **_):
    if prompts[0] == "prompt 2": time.sleep(1000)
    return [1] * len(completions)
async def one_of_many_async(completions, prompts, bonus, **_):
    await asyncio.sleep(0.5 * (prompts[0] == "prompt 2"))
    if prompts[0] == "prompt 2": eval(bonus[0].get("one_of_many_async", "0"))
    return [os.getpid()] * len(completions)
async def every_other_raises(completions, prompts, **_):
    if int(prompts[0].split()[1]) % 2: raise RuntimeError("x" * 4000)
    return [1] * len(completions)
class Object:
    async def __call__(self, completions, **_): return [3] * len(completions)
an_object = Object()
"""


def write_functions(folder: Path) -> Path:
    (folder / "mine.py").write_text(MINE.replace("LONG_SLEEP", LONG_SLEEP).replace("NAP", str(NAP)))
    return folder / "mine.py"


def config(file: Path, *names: str, **fields: float) -> RewardConfig:
    functions = tuple(RewardFunction(name=f"{file}:{name}") for name in names)
    return RewardConfig(functions=functions, **{"timeout": 20} | fields)


@pytest.fixture
def pool(tmp_path):
    file, pools = write_functions(tmp_path), []

    def open_pool(*names: str, **fields: float) -> RewardPool:
        pools.append(RewardPool(config(file, *names, **fields)))
        return pools[-1]

    yield open_pool
    for opened in pools:
        opened.close()


@pytest.fixture(scope="module")
def failing_pool(tmp_path_factory):
    """A pool that masks failed calls; each case finds it working again."""
    fields = {"timeout": 3, "num_workers": 1, "max_failed_fraction": 0.1, "memory_megabytes": 512}
    names = ("one_of_many", "length", "one_of_many_async")
    with closing(
        RewardPool(config(write_functions(tmp_path_factory.mktemp("rewards")), *names, **fields))
    ) as opened:
        yield opened


def samples(num_prompts: int, num_generations: int = 2, bonus: object = None) -> list[Sample]:
    return [
        sample_of(
            "x" * (index + number),
            {"bonus": 10 * index if bonus is None else bonus},
            index,
            number,
        )
        for index in range(num_prompts)
        for number in range(num_generations)
    ]


def scored(pool: RewardPool, batch: list[Sample]) -> list[dict[str, float]]:
    return pool.score(batch, num_completions=len(batch))


ROWS = [{"bonus": 1}]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def is_asleep() -> bool:
    """Whether the process that the functions start is running."""
    commands = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    return ["sleep", LONG_SLEEP] in commands


@pytest.fixture
def others() -> set[int]:
    """Child processes that are not workers, such as the fork server of other tests."""
    return children()


def test_scores_are_in_order_of_groups_and_workers_import_no_torch(pool):
    batch = samples(20, 3)
    scores = scored(pool("length", "bonus", "group", "pid", "has_torch", "given"), batch)
    pids = {score.pop("pid") for score in scores}
    assert os.getpid() not in pids
    assert scores == [
        {
            "length": len(sample.text),
            "bonus": sample.prompt.row["bonus"],
            "group": sum(range(sample.prompt.index, sample.prompt.index + 3)),
            "has_torch": 0,
            "given": 21,
        }
        for sample in batch
    ]


def test_workers_score_at_the_same_time_and_ignore_signals_of_the_scheduler(pool, others):
    """Slurm sends them to every process of a job; they change no score."""
    opened = pool("nap", num_workers=2)
    opened.wait_ready(ROWS)
    roots = [psutil.Process(pid) for pid in children() - others]
    workers = [child for root in roots for child in [root, *root.children(recursive=True)]]
    assert len(workers) == 4  # and a supervisor each

    def send_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            for worker in workers:
                worker.send_signal(number)

    threading.Timer(0.2, send_signals).start()
    starts = [score["nap"] for score in scored(opened, samples(2, 1))]
    assert max(starts) - min(starts) < NAP
    assert all(worker.is_running() for worker in workers)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_scoring_cancelled_from_another_thread_ends_at_once(is_loaded, pool, others):
    opened = pool("hang", timeout=300)
    if is_loaded:
        opened.wait_ready(ROWS)
    threading.Timer(0.5 if is_loaded else 0.0, opened.cancel).start()
    start = time.monotonic()
    with pytest.raises(ScoringCancelled):
        scored(opened, samples(50))
    assert time.monotonic() - start < 60  # the function takes 300 s
    opened.close()
    assert children() <= others
    assert not is_asleep()


MEMORY = "more memory than reward.memory_megabytes 512 allows"
FAILURES = {  # what happens on one prompt: the cause reported, and whether the process is replaced
    "fail(['a'])": ("ZeroDivisionError: division by zero", False),
    "messages(['a'])": ("completions are strings here, where TRL has lists of messages", False),
    "sys.exit('enough')": ("SystemExit: enough", False),
    "interrupt([])": ("KeyboardInterrupt", False),
    "leave([])": ("its process died with exit code 3", True),
    "crash([])": ("its process died with signal SIGSEGV", True),
    "hang_up([])": ("its process has closed the connection to the trainer", True),
    "hoard([])": (MEMORY, True),
    "os.kill(os.getpid(), signal.SIGSTOP)": ("no result after 3.0 s: killed", True),
}


@pytest.mark.parametrize(("deed", "cause", "is_replaced"), [(k, *v) for k, v in FAILURES.items()])
def test_failed_call_costs_the_scores_of_its_prompt_and_no_others(
    deed, cause, is_replaced, failing_pool, capfd
):
    failing_pool._reported.clear()
    batch = samples(10, bonus={"one_of_many": deed})
    scores = scored(failing_pool, batch)
    pids = [score["one_of_many"] for score in scores]
    assert list(map(math.isnan, pids)) == [sample.prompt.index == 2 for sample in batch]
    assert [score["length"] for score in scores] == [len(sample.text) for sample in batch]
    assert len({pid for pid in pids if not math.isnan(pid)}) == 1 + is_replaced
    printed = capfd.readouterr().err
    assert printed.count("reward function one_of_many on prompt 2 ('prompt 2'): ") == 1
    assert cause in printed
    assert str(REPOSITORY / "megatron_grpo") not in printed, "a traceback begins in the function"


@pytest.mark.parametrize(
    ("deed", "cause"),
    [("allocate([1])", MEMORY), ("die([])", "its process died with signal SIGKILL")],
)
def test_failed_asynchronous_call_leaves_a_pool_that_scores(deed, cause, failing_pool, capfd):
    failing_pool._reported.clear()
    for _ in range(2):
        scores = scored(failing_pool, samples(10, bonus={"one_of_many_async": deed}))
        assert sum(math.isnan(score["one_of_many_async"]) for score in scores) == 2
    assert cause in capfd.readouterr().err


def test_fork_of_a_function_does_not_answer_for_it(pool):
    opened = pool("fork", "fork_async", num_workers=1)
    for deed in ("0", "fail([1])"):
        assert scored(opened, samples(2, bonus=deed)) == [{"fork": 1.0, "fork_async": 1.0}] * 4


@pytest.mark.long
def test_worker_that_reads_no_call_costs_that_call_and_is_replaced(pool, others):
    """The call is larger than what the kernel takes while nobody reads."""
    opened = pool("length", timeout=3, num_workers=1, max_failed_fraction=0.5)
    opened.wait_ready(ROWS)
    [supervisor] = [psutil.Process(pid) for pid in children() - others]
    [worker] = supervisor.children()
    worker.suspend()
    batch = [replace(sample, text="x" * (1 << 23)) for sample in samples(2)]
    lengths = [score["length"] for score in scored(opened, batch)]
    assert list(map(math.isnan, lengths[:2])) == [True] * 2
    assert lengths[2:] == [1 << 23] * 2


def test_invalid_result_stops_the_run_however_many_may_fail(pool, others):
    with pytest.raises(RewardError, match=r"bonus on prompt 0 \('prompt 0'\): returned "):
        scored(pool("bonus", max_failed_fraction=0.99), samples(1, bonus=[1]))
    assert children() <= others


def test_process_gets_only_columns_that_its_function_takes(pool, monkeypatch):
    sent = {}

    def send(worker, number, call, seconds):
        function, columns = call
        sent[function] = {*columns}
        original(worker, number, call, seconds)

    original = RewardWorkerProcess.send_call
    monkeypatch.setattr(RewardWorkerProcess, "send_call", send)
    scored(pool("length", "hang", "bonus", "given"), samples(1, bonus=1))
    given = {"completions", "prompts", "completion_ids", "finish_reasons"}
    assert sent == {
        0: {"completions"},
        1: {"completions", "prompts"},
        2: {"completions", "bonus"},
        3: given | {"bonus"},
    }


def test_asynchronous_calls_run_concurrently_up_to_their_number(pool):
    scores = scored(pool("counted", num_workers=2, max_concurrent_calls=8), samples(32))
    assert max(score["counted"] for score in scores) == 8


def test_functions_of_both_kinds_score_together(pool):
    opened = pool("length", "anext_to", "run_a_loop", "an_object", num_workers=1)
    batch = samples(9)
    for _ in range(30):  # an ordinary call may come while the loop ends
        assert scored(opened, batch) == [
            {"length": n, "anext_to": n, "run_a_loop": n, "an_object": 3}
            for n in (len(sample.text) for sample in batch)
        ]


def test_late_asynchronous_call_is_cancelled_and_the_others_go_on(pool, capfd):
    opened = pool("late", timeout=3, max_failed_fraction=0.1)
    pids = [score["late"] for score in scored(opened, samples(10))]
    assert list(map(math.isnan, pids)) == [i // 2 == 2 for i in range(20)]
    assert "late on prompt 2 ('prompt 2'): no result after 3.0 s: cancelled" in (
        capfd.readouterr().err
    )
    pids += [score["late"] for score in scored(opened, samples(2))]
    assert len({pid for pid in pids if not math.isnan(pid)}) == 1


def test_loop_that_does_not_cancel_a_late_call_is_killed_with_its_process(
    pool, others, monkeypatch
):
    monkeypatch.setattr("megatron_grpo.rewards.pool.CANCEL_SECONDS", 1.0)
    opened = pool("blocking", timeout=2, max_failed_fraction=0.9, max_concurrent_calls=1)
    failed = [math.isnan(score["blocking"]) for score in scored(opened, samples(5, 1))]
    assert failed == [False, False, True, False, False]
    opened.close()
    assert children() <= others


def test_large_calls_and_large_errors_pass_each_other(pool):
    """More in either direction than the kernel holds while nobody reads."""
    limits = {"max_failed_fraction": 0.5, "max_concurrent_calls": 500, "timeout": 100}
    opened = pool("every_other_raises", **limits)
    opened.wait_ready(ROWS)
    batch = [replace(sample, text="x" * 20_000) for sample in samples(500)]
    scores = scored(opened, batch)
    assert sum(math.isnan(score["every_other_raises"]) for score in scores) == 500  # none is late


@pytest.mark.parametrize(
    ("then", "error"),
    [("return", ""), ("die", "SIGABRT"), ("hang", r"litter on prompt 0 \('prompt 0'\): no result")],
)
def test_processes_that_a_function_left_end_with_the_pool_in_any_session(then, error, pool, others):
    opened = pool("litter", timeout=2, num_workers=1)
    opened.wait_ready(ROWS)
    with pytest.raises(RewardError, match=error) if error else nullcontext():
        scored(opened, samples(1, bonus=then))
        assert wait_until(is_asleep, seconds=10)
        opened.close()
    assert children() <= others
    assert not is_asleep()


def test_output_of_a_function_is_no_answer(pool, capfd):
    assert scored(pool("gossip"), samples(1)) == [{"gossip": 1.0}] * 2
    assert capfd.readouterr().out.count("x") == 16 << 22


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", r"mine.py has no function or class 'nothing'"),
        (
            "bonus",
            "reward function bonus requires 'bonus': .*"
            "1 of 2 rows have no such column; the first of them has prompt, answer",
        ),
    ],
)
def test_wait_ready_refuses_functions_that_do_not_load_and_missing_columns(
    name, error, pool, others
):
    with pytest.raises(ValueError, match=error):
        pool(name).wait_ready([*ROWS, {"prompt": "p", "answer": "a"}])
    assert children() <= others


def test_file_that_hangs_while_it_loads_is_killed(tmp_path, others, monkeypatch):
    monkeypatch.setattr(supervised, "LOAD_SECONDS", 1.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)")
    function = RewardFunction(name=f"{tmp_path / 'slow.py'}:reward")
    with (
        closing(RewardPool(RewardConfig(functions=(function,), timeout=1))) as opened,
        pytest.raises(ValueError, match=r"slow.py:reward not loaded after 1"),
    ):
        opened.wait_ready([])
    assert children() <= others


def test_math_answer_keeps_its_own_time_limit_in_a_worker():
    hard = sample_of("\\boxed{9^{9^{9^{9}}}}", {"answer": "#### 9"})
    config = RewardConfig(functions=(RewardFunction(name="math_answer"),), num_workers=1)
    with closing(RewardPool(config)) as opened:
        assert scored(opened, [hard]) == [{"math_answer": 0.0}]


TRAINER = """
import sys
from helpers.runs.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.rewards.pool import RewardPool

name, file, timeout = sys.argv[1:]
pool = RewardPool(RewardConfig(functions=(RewardFunction(name=name),), timeout=float(timeout)))
print(*(worker.pid for worker in pool._workers), flush=True)
print(pool.score([sample_of("c", {"bonus": file})], num_completions=1), flush=True)
pool.close()
"""


@contextmanager
def trainer(folder: Path, name: str, timeout: float) -> Iterator[subprocess.Popen[str]]:
    """A process that scores by this function and prints the pids of its workers and the scores."""
    function = f"{write_functions(folder)}:{name}"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, function, folder / "scoring", str(timeout)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, TESTS]))},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_workers_die_with_a_trainer_that_is_killed_even_in_mid_call(tmp_path):
    scoring = tmp_path / "scoring"
    with trainer(tmp_path, "stuck", timeout=60) as process:
        supervisors = {int(pid) for pid in process.stdout.readline().split()}
        assert wait_until(
            lambda: scoring.exists() and scoring.read_text().endswith("\n"), seconds=20
        )
        worker = int(scoring.read_text())
        assert len(supervisors) == 2
        assert is_alive(worker)
    assert wait_until(lambda: not any(map(is_alive, [worker, *supervisors])), seconds=30)
    assert wait_until(lambda: not is_asleep(), seconds=30)


@pytest.mark.parametrize("name", ["nap", "doze"])
def test_time_in_which_all_were_stopped_does_not_make_a_call_late(name, tmp_path):
    with trainer(tmp_path, name, timeout=3) as process:
        process.stdout.readline()
        assert process.stdout.readline() == "begun\n"
        stop_for(7.0, process.pid)  # longer than asynchronous calls may take to be cancelled, too
        assert f"'{name}': nan" not in process.stdout.readline()


def test_pool_closed_while_it_starts_is_gone_at_once_under_nohup_too(pool):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start = time.monotonic()
        for _ in range(3):  # at slightly different moments of the start
            pool("length").close()
        assert time.monotonic() - start < 60
    finally:
        signal.signal(signal.SIGHUP, before)
