"""Engines of a host in a run over several hosts, without other hosts; tests/hosts has them."""

import signal
import sys
from pathlib import Path

import pytest

from helpers.runs.train import TINY_CONFIG
from megatron_grpo import host_part
from megatron_grpo.config.file import load_config
from megatron_grpo.host_part import EnginePart, HostEngines
from megatron_grpo.launch.meeting import FAILED, PREEMPTED, HostFailed, HostPlace

TOKEN = "a" * 64


class AloneHosts:
    """The launchers of a job of one host."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.watched: set[str] = set()

    is_over = False

    def check(self) -> None:
        raise HostFailed(3, self.seen[FAILED])

    def publish(self, key: str, text: str) -> None:
        if key in self.watched:
            self.seen.setdefault(key, text)


@pytest.fixture
def engines_of(tmp_path):
    """Opens one engine that runs a program and is never healthy."""
    opened = []

    def engines_of(hosts, program: str = "", *, has_served: bool = True) -> HostEngines:
        url, command = "http://127.0.0.1:1", [sys.executable, "-c", program]
        part = EnginePart(0, url, command, tmp_path / "engine_0.log", 1, has_served=has_served)
        opened.append(HostEngines([url], [part], TOKEN, hosts, tmp_path))
        return opened[-1]

    yield engines_of
    for engines in opened:
        engines.close()


def starts(log: Path) -> int:
    return log.read_text().count("start\n")


def test_an_engine_is_started_again_three_times_after_longer_pauses(
    engines_of, tmp_path, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(host_part, "running_time", lambda: now)
    engines, found = engines_of(AloneHosts(), "print('start')"), []
    (url,) = engines.base_urls
    for now in range(0, 1000, 10):
        engines.processes[url].process.wait()
        engines.keep()  # sees the end
        engines.keep()  # which its launcher has published
        if starts(tmp_path / "engine_0.log") > len(found):
            found.append(now)
    assert found == [0, 10, 80, 210]
    assert "and stays so" in (tmp_path / "engine_0.log").read_text()


def test_a_part_ends_and_starts_with_the_part_on_another_host(engines_of, tmp_path):
    hosts = AloneHosts()
    engines = engines_of(hosts, "import time; time.sleep(600)")
    (url,) = engines.base_urls
    first = engines.processes[url].process
    hosts.seen["engine/0/0"] = "beta"
    engines.keep()
    assert first.poll() is not None
    engines.keep()
    assert engines.processes[url].process.poll() is None
    assert "its part on beta has" in (tmp_path / "engine_0.log").read_text()


@pytest.mark.parametrize(
    ("program", "code", "end"),
    [("exit(2)", 2, "exit code 2"), ("import os; os.abort()", 1, "signal SIGABRT")],
    ids=["a mistake", "a crash"],
)
def test_an_engine_that_has_not_answered_yet_fails_the_run(engines_of, program, code, end):
    engines = engines_of(AloneHosts(), program, has_served=False)
    engines.processes[engines.base_urls[0]].process.wait()
    with pytest.raises(HostFailed, match=f"engine 0 on .* ended with {end}") as failed:
        engines.check()
    assert failed.value.args[0] == code


class RunningRanks:
    """Ranks that save and end on a signal."""

    are_started, are_preempted, code = True, False, None

    def wait(self, seconds: float) -> None:
        pass

    def forward(self, number: int) -> None:
        self.code, self.are_preempted = (75 if number == signal.SIGTERM else 1), True


def test_ranks_may_end_by_themselves_after_another_host_has_failed(engines_of, monkeypatch):
    times = iter([0.0, 0.0, 19.9, 20.0])
    monkeypatch.setattr(host_part, "running_time", lambda: next(times))
    hosts = AloneHosts()
    hosts.seen[FAILED] = "the ranks on beta have ended"
    engines = engines_of(hosts, "import time; time.sleep(600)")
    with pytest.raises(HostFailed, match="the ranks on beta have ended"):
        host_part._await_end(RunningRanks(), engines, hosts)
    assert next(times, None) is None


def test_ranks_save_when_a_host_without_ranks_is_preempted(engines_of):
    hosts = AloneHosts()
    hosts.seen[PREEMPTED] = "gamma"
    engines = engines_of(hosts, "import time; time.sleep(600)")
    assert host_part._await_end(RunningRanks(), engines, hosts) == 75


def part_of(monkeypatch, visible: str | None, num_gpus: int):
    """The second of two hosts: ranks fill the first one, and it has four engines of two GPUs."""
    monkeypatch.setattr(host_part, "num_gpus", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    overrides = ["parallel.data_parallel_size=8", "parallel.context_parallel_size=1"]
    overrides += ["parallel.tensor_parallel_size=1", "parallel.pipeline_parallel_size=1"]
    overrides += ["rollout.num_engines=4", "rollout.tensor_parallel_size=2"]
    overrides += ["grpo.generation_batch_size=64"]
    cfg = load_config(TINY_CONFIG, overrides)
    return host_part.host_part(cfg, ["CONFIG.yaml"], HostPlace(2, 1, "host0", 29500), 8, None)


@pytest.mark.parametrize(
    ("visible", "num_gpus", "gpus"),
    [
        (None, 8, "4,5"),
        ("8,9,a,b,GPU-1,GPU-2,c,d", 8, "GPU-1,GPU-2"),
        ("-1", 0, None),
    ],
    ids=["all", "some by their names", "none"],
)
def test_an_engine_gets_its_place_among_the_gpus_of_its_host(monkeypatch, visible, num_gpus, gpus):
    part = part_of(monkeypatch, visible, num_gpus)
    _, _, engine, _ = part.engines(["fd00::1", "fd00::2"])
    assert (engine.number, engine.url, engine.gpus) == (2, "http://[fd00::2]:29505", gpus)
    assert {"--host=fd00::2", "--port=29505", "--nnodes=1"} <= {*engine.command}
    assert engine.log == Path("runs/tiny_cpu/logs/engine_2.log")
    assert not part.has_ranks


def test_a_host_that_shows_too_few_gpus_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--gpus-per-node 8: this host has 2 GPUs"):
        part_of(monkeypatch, "0,1", num_gpus=2)
