import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.runs.run_dirs import viewed, write_run
from megatron_grpo.cli import app
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.viewer import html_file
from megatron_grpo.viewer.run import RunFiles, run_names, runs_in


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "math")


@pytest.fixture(scope="module")
def port(run_dir: Path) -> Iterator[int]:
    with viewed({"math": RunFiles(run_dir)}) as port:
        yield port


def request(port: int, url: str, method: str = "GET", host: str | None = None) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, url, headers={"Host": host} if host else {})
    return connection.getresponse()


def ask(port: int, url: str) -> list | dict | None:
    return json.load(request(port, f"/api/{url}"))


def test_the_page_and_its_requests_are_served(port):
    assert b"<title>" in request(port, "/").read()
    assert request(port, "/plotly.min.js").headers["Content-Type"].startswith("text/javascript")
    [run] = ask(port, "runs")
    assert (run["name"], run["step"]) == ("math", 12) and 0 < run["reward"] < 1.2
    assert ask(port, "config?run=0")["grpo"]["beta"] == 0.0
    assert len(ask(port, "metrics?run=0&offset=0&step=-1")["records"]) == 12
    assert {row["step"] for row in ask(port, "completions?run=0&step=5")} == {5}
    assert ask(port, "completions?run=0&step=50") == []
    assert len(ask(port, "eval_completions?run=0&step=8")) == 8
    found = "found?run=0&is_eval=0&field=reward&sign=-1&text=what%20IS&least=1.2"
    assert {row["reward"] for row in ask(port, found)} == {1.2}
    by_function = found.replace("reward", "rewards/exact").replace("1.2", "0")
    exact = [row["rewards"]["exact"] for row in ask(port, by_function)]
    assert exact == sorted(exact, reverse=True) and len({*exact}) == 2
    keys = ask(port, "token_keys?run=0&step=5")
    prompt, sample = keys[0]
    tokens = ask(port, f"tokens?run=0&step=5&prompt_index={prompt}&sample_index={sample}")
    assert (tokens["step"], tokens["prompt_index"], tokens["sample_index"]) == (5, prompt, sample)
    assert ask(port, f"tokens?run=0&step=5&prompt_index={prompt}&sample_index=99") is None
    assert ask(port, "steps_of_prompt?run=0&prompt_index=0") == [3, 6, 9, 12]
    events = ask(port, "timeline?run=0&first=4&last=5")
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["trainer", "rollout"]
    assert {e["args"]["step"] for e in events if "step" in e["args"]} == {4, 5}


@pytest.mark.parametrize(
    "url",
    [
        "../run.py",
        "api/",
        "api/runs/0",
        "api/answer?run=0",
        "api/config?run=1",
        "api/config",
        "api/config?run=0&step=1",
        "api/completions?run=0",
        "api/completions?run=0&step=x",
    ],
)
def test_nothing_else_is_served(port, url):
    assert request(port, f"/{url}").status == 404


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_is_answered(port, method):
    assert request(port, "/", method).status == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9000", 200),  # the port of a tunnel
        ("127.0.0.1", 200),
        ("evil.example:8808", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example", 403),
    ],
)
def test_a_page_under_another_name_gets_nothing(port, host, status):
    assert request(port, "/api/runs", host=host).status == status


def mistake(*arguments: str) -> str:
    with pytest.raises(ValueError) as raised:
        CliRunner().invoke(app, ["view", *arguments], catch_exceptions=False)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_mistakes_are_reported_in_one_line(run_dir, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = listening.getsockname()[1]
        assert f"port {taken} of 127.0.0.1" in mistake(str(run_dir), f"--port={taken}")
    assert "has no metrics.jsonl" in mistake(str(tmp_path))
    monkeypatch.setattr(html_file, "find_spec", lambda name: None)
    for more in ([], [f"--html={tmp_path / 'run.html'}"]):
        assert "pip install 'megatron-grpo[view]'" in mistake(str(run_dir), *more)


def test_view_starts_without_torch(run_dir, tmp_path):
    code = (
        "import sys; from megatron_grpo.cli import app; "
        f"app(['view', {str(run_dir)!r}, '--html', {str(tmp_path / 'run.html')!r}],"
        " standalone_mode=False); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "run.html").stat().st_size > 4_000_000


def test_runs_are_called_by_their_folders_unless_two_have_the_same(tmp_path):
    assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    both = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert run_names(both) == [str(each) for each in both]


def test_a_folder_of_runs_stands_for_its_runs_the_newest_first(tmp_path):
    old, new, other = (write_run(tmp_path / f"runs/{name}") for name in ("b", "a", "x/other"))
    os.utime(old / "metrics.jsonl", (0, 0))
    assert runs_in([other, tmp_path / "runs"]) == [other, new, old]


def test_ctrl_c_ends_it_quietly(run_dir):
    reserved = reserve_port()
    port = reserved.getsockname()[1]
    command = [sys.executable, "-m", "megatron_grpo", "view", str(run_dir), f"--port={port}"]
    # A command in the background of a shell script would ignore the signal.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    view = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, preexec_fn=heeds)
    try:
        assert view.stdout.readline().startswith(f"http://127.0.0.1:{port} ")
        assert request(port, "/api/runs").status == 200
        view.send_signal(signal.SIGINT)
        _, errors = view.communicate(timeout=20)
        assert (view.returncode, errors) == (0, "")
    finally:
        view.kill()
        view.communicate()
        reserved.close()
