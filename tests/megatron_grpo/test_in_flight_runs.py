"""Whole runs that push weights while completions are in progress."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from helpers.engines.live import Proxy, running_engine
from helpers.runs.in_flight import (
    MAX_STALENESS,
    NUM_GENERATIONS,
    NUM_STEPS,
    check_nothing_lost,
    check_run,
    make_in_flight_runs,
    newest_folder,
    newest_groups,
    saved_parts,
)
from helpers.runs.jobs import Job, Runs
from helpers.runs.train import TINY_CONFIG, read_json_lines, read_metrics
from megatron_grpo.checkpoints.experience_file import OPEN, SAMPLES_FILE
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.choice import CUT
from megatron_grpo.engines.joining import FOLDER, JOINED, LEAVING, JoinedEngine, settings_of
from megatron_grpo.rollout.services import load_stream

pytestmark = pytest.mark.engines


@pytest.mark.long
def test_in_flight_tokens_are_no_older_than_allowed(in_flight_runs):
    in_flight_runs.finish("whole")
    run_dir = in_flight_runs.folder / "whole"
    check_run(run_dir)
    records = read_metrics(run_dir)
    assert max(record["rollout/staleness_max"] for record in records) == MAX_STALENESS
    assert any(record["rollout/mixed_versions_frac"] > 0 for record in records)


def wait_for_steps(job: Job, run_dir: Path, count: int) -> None:
    """Wait until the run has logged `count` steps."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert job.is_running and time.monotonic() < deadline, job.output
        time.sleep(0.01)


@pytest.mark.slow
def test_run_killed_again_and_again_loses_nothing(in_flight_runs):
    run_dir, option = in_flight_runs.folder / "killed", "train.save_generations=true"
    saved = []
    for num_steps in (3, 6):
        with in_flight_runs.start("killed", option) as job:
            wait_for_steps(job, run_dir, num_steps)
            job.signal(signal.SIGKILL)
            assert job.end(60).exit_codes == [-signal.SIGKILL]
        saved.append(saved_parts(run_dir))
    in_flight_runs.finish("killed", option)
    check_run(run_dir)
    assert any(saved)  # whole samples or cut ones: that depends on the moments
    check_nothing_lost(run_dir, saved, NUM_STEPS)


@pytest.mark.long
def test_with_over_sampling_a_kill_loses_no_prompt(in_flight_runs):
    run_dir, option = in_flight_runs.folder / "over", "rollout.over_sampling=2.5"
    with in_flight_runs.start("over", option) as job:
        wait_for_steps(job, run_dir, 5)
        job.signal(signal.SIGKILL)
        assert job.end(60).exit_codes == [-signal.SIGKILL]
    saved = read_json_lines(newest_folder(run_dir) / f"{OPEN}{SAMPLES_FILE}")
    in_flight_runs.finish("over", option)
    check_run(run_dir)
    rows = read_json_lines(run_dir / "completions.jsonl")
    groups = Counter(row["prompt_index"] for row in rows)
    assert set(groups.values()) == {NUM_GENERATIONS}
    dropped = [record["rollout/dropped_stale"] for record in read_metrics(run_dir)]
    assert len(dropped) == NUM_STEPS
    made = {(row["prompt_index"], row["sample_index"]): row["completion"] for row in rows}
    whole = [row for row in saved if row["finish_reason"] != CUT]
    assert whole
    lost = [row for row in whole if made[row["prompt"], row["sample_index"]] != row["text"]]
    assert len(lost) <= NUM_GENERATIONS * sum(dropped)


@pytest.mark.slow
def test_preempted_run_saves_what_is_ready(in_flight_runs):
    run_dir = in_flight_runs.folder / "preempted"
    with in_flight_runs.start("preempted", "train.save_interval=100") as job:
        wait_for_steps(job, run_dir, 3)
        job.signal(signal.SIGTERM)
        ended = job.end(30)
    assert ended.exit_codes == [75], ended.output
    saved = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))
    assert saved >= 3
    in_flight_runs.finish("preempted")
    check_run(run_dir)


@pytest.mark.slow
def test_completions_go_on_when_the_only_engine_is_lost(in_flight_runs):
    proxy = Proxy(in_flight_runs.engine.servers.base_urls[0])
    run_dir = in_flight_runs.folder / "lost"
    with in_flight_runs.start("lost", f"rollout.base_urls=[{proxy.url}]") as job:
        wait_for_steps(job, run_dir, 3)
        proxy.cut()
        time.sleep(1)
        proxy.mend()
        ended = job.end(120)
    proxy.cut()
    assert ended.exit_codes == [0], ended.output
    assert "is lost" in ended.outputs[0] and "is back" in ended.outputs[0]
    check_run(run_dir)


# 300 steps, with engines that die, join and leave.

MANY_STEPS, OLDEST = 300, 4
SLOW_REWARD = """
import time, zlib

def digits(completions, **_):
    '''Share of digits, after up to 0.2 s.'''
    time.sleep(zlib.crc32("".join(completions).encode()) % 200 / 1000)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


class Commotion:
    """Cuts connections to an engine, and has another one join, leave and lose its connections."""

    def __init__(self, own: Proxy, other: Proxy, file: Path, engine: JoinedEngine) -> None:
        self._own, self._other, self._file, self._engine = own, other, file, engine
        self._random = random.Random(0)
        self.events: Counter[str] = Counter()

    def go_on(self) -> None:
        """A random event."""
        deed = self._random.choice([self._cut_own, self._cut_other, self._join_or_leave])
        self.events[deed()] += 1

    def _cut_own(self) -> str:
        return self._cut(self._own, "own")

    def _cut_other(self) -> str:
        return self._cut(self._other, "other" if self._file.exists() else "idle")

    def _cut(self, proxy: Proxy, name: str) -> str:
        proxy.cut()
        time.sleep(self._random.uniform(0, 2))
        proxy.mend()
        if self._file.exists():
            self._file.touch()  # as `serve --join` does
        return f"cut {name}"

    def _join_or_leave(self) -> str:
        if self._file.exists():
            self._file.rename(self._file.with_suffix(LEAVING))
            return "leave"
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_bytes(msgspec.json.encode(self._engine))
        return "join"


@contextmanager
def commotion(job: Job, run_dir: Path, what: Commotion) -> Iterator[None]:
    """An event every few steps while the block waits for the run."""
    chance, metrics, is_over = random.Random(1), run_dir / "metrics.jsonl", threading.Event()

    def go_on() -> None:
        due = 5
        while not is_over.wait(0.05):
            if metrics.exists() and len(metrics.read_text().splitlines()) >= due:
                what.go_on()
                due += chance.randint(3, 12)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_flight_300_steps_of_engines_that_die_and_join(tied_model, tmp_path):
    with running_engine("vllm", tied_model, tmp_path / "engines", num_engines=2) as engines:
        check_many_steps(make_in_flight_runs(tied_model, engines, tmp_path))


def check_many_steps(runs: Runs) -> None:
    """The first of two engines is the run's own, the second joins and leaves."""
    folder, run_dir = runs.folder, runs.folder / "many"
    (folder / "reward.py").write_text(SLOW_REWARD)
    own, other = map(Proxy, runs.engine.servers.base_urls)
    arguments = [
        f"rollout.base_urls=[{own.url}]",
        f"rollout.max_staleness={OLDEST}",
        "rollout.over_sampling=2.5",
        "rollout.max_completion_length=100",
        "rollout.stop_token_ids=[7,8,9,10,11]",
        f"reward.functions=[{folder / 'reward.py'}:digits]",
        f"train.num_steps={MANY_STEPS}",
        "train.save_interval=50",
        "optimizer.lr=1e-5",
    ]
    cfg = load_config(TINY_CONFIG, [*runs.arguments, f"train.run_dir={run_dir}", *arguments])
    joined = JoinedEngine(other.url, settings_of(cfg.model, cfg.rollout, cfg.lora))
    what = Commotion(own, other, run_dir / FOLDER / f"other{JOINED}", joined)
    with runs.start("many", *arguments) as job, commotion(job, run_dir, what):
        ended = job.end(1500)
    own.cut()
    other.cut()
    assert ended.exit_codes == [0], ended.output
    assert {"join", "leave", "cut own", "cut other"} <= what.events.keys()
    check_run(run_dir, MANY_STEPS, OLDEST)
    records = read_metrics(run_dir)
    assert {1, 2} <= {record["rollout/num_engines"] for record in records}
    assert max(record["rollout/staleness_max"] for record in records) > 1
    dropped = sum(record["rollout/dropped_stale"] for record in records)
    print(f"{dict(what.events)}; {dropped:.0f} groups dropped")

    rows = read_json_lines(run_dir / "completions.jsonl")
    each = Counter(row["prompt_index"] for row in rows if row["sample_index"] == 0)
    groups = newest_groups(run_dir)
    stream = load_stream(cfg, read_shape(cfg.model.path), load_tokenizer(cfg.model.path))
    size = stream.batch_size
    row_of = [stream.batch(n // size)[n % size].index for n in range(groups.next_number)]
    assert each + Counter(row_of[number] for number in groups.untaken) == Counter(row_of)
    texts = Counter(
        (row["prompt_index"], row["completion"]) for row in rows if row["num_tokens"] > 30
    )
    assert max(texts.values()) == 1
