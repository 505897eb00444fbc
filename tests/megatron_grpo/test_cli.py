"""The command line as users see it: help, and one clear message for every mistake."""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from helpers.engines.live import SGLANG_PYTHON, random_prompts, sampling_params, wait_until
from helpers.engines.sampling import Completions, generate
from helpers.pushes.policies import client_of, push_folder
from helpers.ranks.cpu_time import seconds_of_a_million_numbers
from helpers.runs.train import RUN_MARK, TINY_CONFIG, finish_run, marked_processes
from megatron_grpo.cli import app
from megatron_grpo.config.file import load_config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.engines.processes import log_tail, reserve_port
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE
from megatron_grpo.prompt_checks import what_was_tried
from megatron_grpo.rewards.pool import Trial
from megatron_grpo.rewards.scoring import Scores

TOKEN = "0123456789abcdef"
MILLIONS = 200
"""A mistake must be reported within the CPU time of so many million numbers, some 14 s. Imports
take most of it; with a mistake in the data, also of Megatron-Core."""


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (["grpo.epsilom=0.2"], "did you mean 'grpo.epsilon'"),
        (["data.prompt_column=question"], "'prompt', 'answer'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistake_ends_in_seconds_with_one_message(mistake, message, tied_model, sums, tmp_path):
    run = finish_run(
        f"model.path={tied_model}",
        f"data.path={sums}",
        f"train.run_dir={tmp_path / 'run'}",
        *mistake,
    )
    assert run.exit_code == 2, run.output
    assert message in run.output
    assert run.output.startswith("megatron-grpo: "), "nothing but the message"
    assert "Traceback" not in run.output
    assert run.cpu_seconds < MILLIONS * seconds_of_a_million_numbers()
    assert run.survivors == []


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        (
            "import megatron_grpo.preflight, megatron_grpo.engines.server, "
            "megatron_grpo.planning.command",
            {"torch", "transformers", "megatron"},
        ),
        (
            "from megatron_grpo import Report, Run, check, load_config, plan, train",
            {"torch", "transformers", "megatron", "numpy", "aiohttp", "rich", "typer"},
        ),
    ],
    ids=["preflight and plan", "Python"],
)
def test_imports_are_light_and_warn_of_nothing(imported, heavy):
    code = f"{imported}; import sys; print({heavy} & sys.modules.keys())"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (result.stdout, result.stderr) == ("set()\n", "")


REFUSALS = """
import sys
from megatron_grpo.cli import app
*given, overrides = sys.argv[1:]
for override in overrides.split():
    try:
        app([*given, override], standalone_mode=False)
    except ValueError as error:
        print(error, "torch" in sys.modules, sep="; ")
"""
HERE = Path.cwd()
MISSING = {
    "data.path=/nowhere": "data.path /nowhere does not exist",
    "data.path=rows.jsonl": f"data.path rows.jsonl does not exist in {HERE}",
    "eval.data.path=rows.jsonl": f"eval: data.path rows.jsonl does not exist in {HERE}",
    "reward.functions=[no.py:score]": f"file of reward functions no.py does not exist in {HERE}",
    "environment.name=no.py:Game": f"file of an environment no.py does not exist in {HERE}",
}


def test_files_that_do_not_exist_are_named_before_torch_is_imported(tied_model, sums):
    given = [str(TINY_CONFIG), f"model.path={tied_model}", f"data.path={sums}", " ".join(MISSING)]
    command = [sys.executable, "-c", REFUSALS, "train", *given]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines() == [f"{message}; False" for message in MISSING.values()]


COMMANDS = {each.name or each.callback.__name__: each.callback for each in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_command_with_an_example_as_it_is_typed(name):
    assert f"\n  {name} " in shown("--help")
    text = shown(name, "--help")
    _, example, lines = inspect.getdoc(COMMANDS[name]).partition("Example")
    assert example
    for line in lines.replace("\b", "").splitlines():
        assert line in text, "no bracket is swallowed, and no line broken"
    assert max(map(len, text.splitlines())) <= 80


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


def run_check(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_grpo", "check", str(TINY_CONFIG), *overrides]
    root = TINY_CONFIG.parents[1]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)


@pytest.mark.parametrize(
    ("settings", "scores", "tried"),
    [
        ([], {"f": 1.0}, "; rewards were tried"),
        (["reward.functions=[]", "environment.name=a.py:B"], {}, ""),
        (["reward.functions=[]", "agent.command=a"], {}, "; the agent was started"),
        (["agent.listen=0.0.0.0:0"], {"f": 1.0}, "; rewards were tried"),
    ],
)
def test_check_says_which_code_of_the_user_it_has_tried(settings, scores, tried):
    cfg = load_config(TINY_CONFIG, ["data.max_prompt_length=9", *settings])
    assert what_was_tried(cfg, [Trial("text", Scores(scores), is_answer=False)]) == tried


@pytest.mark.long
def test_check_says_that_a_config_can_start_and_starts_nothing(tied_model, sums, tmp_path):
    run_dir = tmp_path / "run"
    good = [f"model.path={tied_model}", f"data.path={sums}", f"train.run_dir={run_dir}"]
    result = run_check(*good)
    assert result.returncode == 0, result.stderr
    sample, _, last = result.stdout.rstrip("\n").rpartition("\n")
    assert last.startswith(f"the run in {run_dir} can start: ")
    assert (
        sample.startswith("2 optimizer steps; row 0 of the data becomes ")
        and "What is 0 + 1?" in sample
    )
    assert not run_dir.exists()


def serve(
    tied_model: Path, token: str, *options: str, output: Any = subprocess.PIPE, **variables: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_grpo", "serve", str(TINY_CONFIG)]
    return subprocess.Popen(
        [*command, f"model.path={tied_model}", *options],
        env=os.environ | variables | {TOKEN_VARIABLE: token},
        stderr=output,
        text=True,
    )


@pytest.mark.parametrize(
    ("token", "options", "message"),
    [
        ("", [], "MEGATRON_GRPO_TOKEN is not set"),
        (TOKEN, ["--host=::"], "--host :: would listen on every network"),
        (TOKEN, ["--nnodes=2"], "--nnodes 2: an engine spans nodes only where something ends it"),
        (
            TOKEN,
            ["rollout.vllm={speculative_config: {method: mtp, num_speculative_tokens: 1}}"],
            "drafts with mtp, and model.path has no layer for multi-token prediction",
        ),
    ],
)
def test_serve_refuses_what_it_cannot_start(tied_model, token, options, message):
    engine = serve(tied_model, token, *options)
    try:
        _, errors = engine.communicate(timeout=60)
    finally:
        engine.kill()
    assert engine.returncode == 2
    assert errors.startswith("megatron-grpo: ") and message in errors
    assert "Traceback" not in errors


@contextmanager
def served(tied_model: Path, log: Path, **rollout: Any) -> Iterator[str]:
    """The address of a ready engine; at its end no process is left, and no file but vLLM's
    sockets."""
    given, mark = [f"rollout.{key}={value}" for key, value in rollout.items()], uuid.uuid4().hex
    with (
        reserve_port() as reserved,
        tempfile.TemporaryDirectory() as own,  # short enough for an engine's sockets
        log.open("w") as output,
    ):
        port = reserved.getsockname()[1]
        url, given = f"http://127.0.0.2:{port}", [*given, "--host=127.0.0.2", f"--port={port}"]
        variables = {RUN_MARK: mark, "TMPDIR": own}
        engine = serve(tied_model, TOKEN, *given, output=output, **variables)
        try:
            assert wait_until(lambda: engine.poll() is not None or is_healthy(url), seconds=240)
            assert engine.poll() is None, log_tail(log, 0)
            yield url
            engine.terminate()
            assert wait_until(lambda: not marked_processes(mark), 60), marked_processes(mark)
            assert rollout["engine"] == "vllm" or [*Path(own).iterdir()] == []
        finally:
            for process in marked_processes(mark):
                process.kill()
            engine.wait()


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("vllm", marks=pytest.mark.long),
        pytest.param("sglang", marks=[pytest.mark.long, pytest.mark.engines]),
    ],
)
def test_serve_is_an_engine_for_runs_that_name_its_address(
    tied_model, tmp_path, engine, engine_kind
):
    kind = {"engine": engine}
    if engine == "sglang":
        kind = engine_kind if engine_kind["engine"] == engine else pytest.skip("no --engine sglang")
    rollout = RolloutConfig(**kind, max_completion_length=4)
    with served(tied_model, tmp_path / "log", **kind) as url:
        assert not is_healthy(url.replace("127.0.0.2", "127.0.0.1"))
        push_folder(tied_model, rollout, [url], TOKEN, version=1)
        client = client_of([url], TOKEN)
        client.pool.finish_push([url])
        params = sampling_params(policy_version=1, max_completion_length=4)
        samples = generate(client, Completions(random_prompts(1), params))
        assert len(samples) == 2
        assert httpx.post(f"{url}/inference/v1/generate", json={}).status_code == 401


@pytest.mark.slow
@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="`make setup-sglang` makes it")
def test_serve_of_sglang_leaves_no_shared_memory(tied_model, tmp_path):
    shared_memory, kind = Path("/dev/shm"), {"engine": "sglang", "python": SGLANG_PYTHON}
    before = {*shared_memory.glob("sgl_shm_mq_*")}
    with served(tied_model, tmp_path / "log", **kind, tensor_parallel_size=2):
        queues = {*shared_memory.glob("sgl_shm_mq_*")} - before
        assert queues
    assert not [each for each in queues if each.exists()]
