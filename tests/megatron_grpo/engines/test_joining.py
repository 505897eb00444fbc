"""Engines that join a run and leave it, by their files in its directory."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from demo.make_sums import sums
from helpers.engines.live import wait_until
from helpers.engines.scripted import URL as OWN
from helpers.engines.scripted import NoServers
from helpers.oracle.policies import tiny_config
from helpers.runs.jobs import Job
from helpers.runs.train import steps_of
from megatron_grpo.config.config import Config
from megatron_grpo.engines.engine import COUNTS
from megatron_grpo.engines.pool import EnginePool, JoinFolder
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, bearer
from parallel import ParallelDims

pytestmark = pytest.mark.engines

OTHER = "http://127.0.0.2:1"  # where nobody listens, as at OWN
SETTINGS = {"model.dtype": "float32", "rollout.tensor_parallel_size": 1}


def folder_of(tmp_path: Path, refusal: str = "") -> JoinFolder:
    return JoinFolder(tmp_path, SETTINGS, [OWN], refusal)


def write(file: Path, url: str = OTHER, **settings: object) -> None:
    file.write_text(json.dumps({"url": url, "settings": SETTINGS | settings}))


def pool_of(tmp_path: Path, model: Path) -> EnginePool:
    rollout = tiny_config(model, ParallelDims()).rollout
    return EnginePool(NoServers(are_ours=False), rollout, folder_of(tmp_path))


def test_join_and_leave_follow_the_files(tmp_path, tied_model, capfd):
    pool, file = pool_of(tmp_path, tied_model), tmp_path / "other.json"
    pool.join_and_leave()
    write(file)
    pool.join_and_leave()
    assert [*pool.starting] == [OTHER]  # until it answers
    pool.mark_recovered(OTHER)
    pool.finish_push([OWN, OTHER])
    pool.join_and_leave()
    assert [*pool.serving] == [OWN, OTHER]
    leaving = file.rename(file.with_suffix(".leaving"))
    pool.join_and_leave()
    assert [*pool.serving] == [OWN]
    assert not leaving.exists()
    lines = [f"rollout engine {OTHER} joins", f"rollout engine {OTHER} has left"]
    assert capfd.readouterr().err.splitlines() == lines


def test_join_and_leave_drop_an_engine_without_a_file(tmp_path, tied_model):
    pool = pool_of(tmp_path, tied_model)
    write(tmp_path / "own.json", OWN)
    write(tmp_path / "other.json")
    pool.join_and_leave()
    pool.finish_push([OWN, OTHER])
    for name in ("own.json", "other.json"):
        (tmp_path / name).unlink()
    pool.join_and_leave()
    assert [*pool.serving] == [OWN]


def test_check_engines_asks_a_dead_one_once_per_file(tmp_path, tied_model, capfd):
    pool, file = pool_of(tmp_path, tied_model), tmp_path / "other.json"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.setblocking(False)
        write(file, url := f"http://127.0.0.1:{mute.getsockname()[1]}")

        def is_asked() -> bool:
            pool.join_and_leave()
            assert not pool.check_engines()
            with suppress(BlockingIOError):
                mute.accept()[0].close()
                return True
            return False

        assert [is_asked() for _ in range(3)] == [True, False, False]
        os.utime(file, ns=(1, 1))
        assert [is_asked() for _ in range(2)] == [True, False]
    lines = [line for line in capfd.readouterr().err.splitlines() if url in line]
    again = "does not answer: it is checked again when its file in engines/ has changed"
    assert lines == [f"rollout engine {url} joins", *[f"rollout engine {url} {again}"] * 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"url": "http://127.0', "the file cannot be read: Input data was truncated"),
        ('{"address": 1, "url": "http://127.0.0.1:1"}', "the file cannot be read: "),
        ({"url": "127.0.0.1:8000"}, "'127.0.0.1:8000' is not an address like http://host:8000"),
        ({"url": "http://10.0.0.1:8000"}, "the ranks listen on loopback alone"),
        (
            {"settings": SETTINGS | {"rollout.tensor_parallel_size": 2}},
            "its rollout.tensor_parallel_size is 2, the run's 1: start it with the run's config",
        ),
        ({"settings": {}}, "its model.dtype is None, the run's float32"),
    ],
    ids=["cut short", "another file", "no address", "another network", "size", "no settings"],
)
def test_joined_names_once_an_engine_that_cannot_join(content, reason, tmp_path, capfd):
    if isinstance(content, dict):
        content = json.dumps({"url": OTHER, "settings": SETTINGS} | content)
    (tmp_path / "a.json").write_text(content)
    write(tmp_path / "b.json")
    folder = folder_of(tmp_path)
    assert [*folder.joined()] == [*folder.joined()] == [OTHER]
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"the engine of {tmp_path / 'a.json'} cannot join: ") and reason in line


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.enable_sleep_mode=true", f"rollout.base_urls=[{OWN}]"], "enable_sleep_mode"),
        (["train.replay=/somewhere"], "train.replay takes generations from a file"),
        ([], "the run starts its engines itself, with a token that no other has"),
    ],
)
def test_of_run_says_why_none_can_join(overrides, reason, tmp_path, tied_model, capfd):
    cfg: Config = tiny_config(
        tied_model, ParallelDims(), *overrides, f"train.run_dir={tmp_path / 'run'}"
    )
    folder = tmp_path / "run" / "engines"
    folder.mkdir(parents=True)
    write(folder / "a.json")
    assert JoinFolder.of_run(cfg).joined() == {}
    assert reason in capfd.readouterr().err


# A process that answers as an engine does, without weights.
STAND_IN = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/end":
            self.server.shutdown_request(self.request)
            sys.exit(3)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVE = """
import os, sys
from pathlib import Path
from megatron_grpo.engines import joining
from megatron_grpo.engines.joining import JoinedEngine, serve_joined
port, folder, stand_in, joining.TOUCH_SECONDS = *sys.argv[1:4], float(sys.argv[4])
engine = JoinedEngine(f"http://127.0.0.1:{port}", {})
command, complete = [sys.executable, "-c", stand_in, port], Path(folder).with_name("complete")
serve_joined(command, os.environ, Path(folder), engine, complete.exists)
"""


@contextmanager
def serving(
    folder: Path, touch_seconds: float = 30.0
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`serve_joined` of a stand-in that has joined, and its file."""
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        arguments = [str(port), str(folder), STAND_IN, str(touch_seconds)]
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments], stderr=subprocess.PIPE, text=True
        )
        file = folder / f"127.0.0.1_{port}.json"
        try:
            assert wait_until(file.exists, seconds=60)
            yield process, file
        finally:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_serve_joined_leaves_on_a_signal(tmp_path):
    with serving(tmp_path) as (process, file):
        process.send_signal(signal.SIGUSR1)
        leaving = file.with_suffix(".leaving")
        assert wait_until(leaving.exists, seconds=10) and not file.exists()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        leaving.unlink()
        assert process.wait(30) == 0


def test_serve_joined_touches_its_file_until_it_is_killed(tmp_path):
    with serving(tmp_path, touch_seconds=0.0) as (process, file):
        os.utime(file, ns=(1, 1))
        assert wait_until(lambda: file.stat().st_mtime_ns > 1, seconds=10)
        process.kill()
        process.wait()
        os.utime(file, ns=(1, 1))
        assert not wait_until(lambda: file.stat().st_mtime_ns > 1, seconds=1.5)


@pytest.mark.parametrize("end", ["two signals", "run complete", "by itself"])
def test_serve_joined_leaves_no_file_when_it_ends(end, tmp_path):
    (folder := tmp_path / "engines").mkdir()
    with serving(folder) as (process, file):
        url = "http://" + file.stem.replace("_", ":")
        if end == "two signals":  # it does not wait for the run
            process.send_signal(signal.SIGTERM)
            assert wait_until(file.with_suffix(".leaving").exists, seconds=10)
            process.send_signal(signal.SIGTERM)
        elif end == "run complete":
            (tmp_path / "complete").touch()
        else:
            httpx.get(f"{url}/end")
        assert process.wait(30) == (1 if end == "by itself" else 0)
        assert [*folder.iterdir()] == []
        error = f"rollout engine {url} ended with exit code 3"
        assert (error in process.stderr.read()) == (end == "by itself")


@pytest.mark.slow
def test_serve_joins_and_leaves_a_run_that_trains(reference_engine, tied_model, tmp_path):
    run_dir, data = tmp_path / "run", tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    token = reference_engine.servers.token
    job = Job(
        [
            f"model.path={tied_model}",
            f"data.path={data}",
            f"train.run_dir={run_dir}",
            f"rollout.base_urls=[{reference_engine.servers.base_urls[0]}]",
            *[f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")],
            "train.num_steps=10000",
        ],
        1,
        tmp_path / "logs",
        token=token,
    )
    with job, reserve_port() as reserved:
        job.wait_for(lambda: steps_of(run_dir), 120)
        port = reserved.getsockname()[1]
        url = f"http://127.0.0.1:{port}"

        def num_generated() -> float:
            page = httpx.get(f"{url}/metrics", headers=bearer(token)).text
            return float(COUNTS["generated"].search(page)[1])

        command = [sys.executable, "-m", "megatron_grpo", "serve", run_dir / "config.yaml"]
        engine = subprocess.Popen(
            [*command, "--join", f"--port={port}"], env=os.environ | {TOKEN_VARIABLE: token}
        )
        try:
            job.wait_for(lambda: f"rollout engine {url} joins" in job.output, 120)
            job.wait_for(lambda: num_generated() > 500, 60)
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(60) == 0
            assert f"rollout engine {url} has left" in job.output
            num_steps = len(steps_of(run_dir))
            job.wait_for(lambda: len(steps_of(run_dir)) > num_steps + 1, 60)
            assert "is lost" not in job.output and "push of weights failed" not in job.output
            assert [*(run_dir / "engines").iterdir()] == []
        finally:
            engine.kill()
