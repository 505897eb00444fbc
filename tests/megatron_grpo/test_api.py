"""Runs from Python: a report or an error for each, and nothing left of one that is interrupted."""

import os
import signal
import subprocess
import sys
import uuid
from functools import partial

import pytest

from helpers.engines.live import wait_until
from helpers.runs.jobs import AXES, write_sums
from helpers.runs.train import (
    RUN_MARK,
    TINY_CONFIG,
    marked_processes,
    read_json_lines,
    read_metrics,
)
from megatron_grpo import Run, load_config, plan, train
from megatron_grpo.config.file import as_overrides, dump_config, with_overrides
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, interrupted_text
from megatron_grpo.planning.command import print_plan

ONE_RANK = {f"parallel.{axis}_parallel_size": 1 for axis in AXES}


@pytest.fixture
def cfg(tied_model, tmp_path):
    paths = {"model.path": tied_model, "data.path": write_sums(tmp_path)}
    return load_config(TINY_CONFIG, train={"run_dir": tmp_path / "run"}, **paths, **ONE_RANK)


@pytest.mark.long
def test_train_reports_the_end_of_a_run_that_run_reads(cfg, live_engine, capsys, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, live_engine.servers.token)
    report = train(cfg, rollout={"base_urls": live_engine.servers.base_urls[:1]})
    run_dir = cfg.train.run_dir
    assert (report.state, report.steps, report.model) == ("complete", 2, run_dir / "hf")
    assert "step 2/2  reward " in capsys.readouterr().out
    run = Run(report.run_dir)
    assert run.metrics() == read_metrics(run_dir) and report.metrics == run.metrics()[-1]
    rows = read_json_lines(run_dir / "completions.jsonl")
    assert run.completions(step=1) + run.completions() == rows and len(rows) == 32
    assert run.config.model == cfg.model


def test_a_run_that_fails_raises_its_message(cfg, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    with pytest.raises(ValueError, match=r"^model\.path .*nowhere is not a folder: give"):
        train(cfg, model={"path": "nowhere"})
    with pytest.raises(RuntimeError, match=r"^rollout engine http://127\.0\.0\.1:9 is not healthy"):
        train(cfg, rollout={"base_urls": ["http://127.0.0.1:9"]})


def test_keys_that_follow_others_follow_overrides_from_python(cfg, tmp_path):
    held_out = {"data": {"path": cfg.data.path}, "pass_threshold": 1.0}
    with_eval = with_overrides(cfg, as_overrides({"eval": held_out}))
    changed = with_overrides(with_eval, ["data.prompt_column=question"])
    assert changed.eval.data and changed.eval.data.prompt_column == "question"
    sets = {"a": held_out, "b": {**held_out, "max_prompts": 3}}
    with_sets = with_overrides(cfg, as_overrides({"eval": {"num_generations": 2, "sets": sets}}))
    also = ["data.prompt_column=question", "eval.num_generations=4", "eval.max_prompts=5"]
    a, b = with_overrides(with_sets, also).eval.sets.values()
    assert a.data and b.data and a.data.prompt_column == b.data.prompt_column == "question"
    assert (a.num_generations, b.num_generations) == (4, 4) and a.k == (1, 4)
    assert (a.max_prompts, b.max_prompts) == (5, 3)
    (saved := tmp_path / "config.yaml").write_text(dump_config(cfg))
    of_saved = load_config(saved, grpo={"loss_type": "dr_grpo"})
    assert of_saved.grpo.aggregation == "constant"


INTERRUPTED = """
import sys
from megatron_grpo import load_config, train
try:
    train(load_config(sys.argv[1]))
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.long
def test_an_interrupt_ends_the_run_and_leaves_nothing(cfg, tmp_path):
    file, mark = tmp_path / "config.yaml", uuid.uuid4().hex
    file.write_text(dump_config(cfg))
    command = [sys.executable, "-c", INTERRUPTED, file]
    options = {"env": os.environ | {RUN_MARK: mark}, "stdout": subprocess.PIPE, "text": True}
    # A command in the background of a shell script would ignore the signal.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    script = subprocess.Popen(command, preexec_fn=heeds, **options)
    try:
        printed = iter(script.stdout)
        assert any("rollout engines start" in line for line in printed)
        script.send_signal(signal.SIGINT)
        lines = [*printed]
        assert lines[-2:] == [
            f"megatron-grpo: {interrupted_text(cfg.train.run_dir)}\n",
            "stopped\n",
        ]
        assert wait_until(lambda: not marked_processes(mark), 5)
    finally:
        for process in marked_processes(mark):
            process.kill()
        script.communicate()


def test_overrides_are_dotted_or_nested_values_of_python():
    given = {"optimizer.lr": 1e-6, "model.megatron": {"attention_dropout": 0.0}}
    changed = load_config(TINY_CONFIG, data={"system_prompt": "yes # no", "date": None}, **given)
    assert changed.data.system_prompt == "yes # no" and changed.optimizer.lr == 1e-6
    assert changed.model.megatron == {"attention_dropout": 0.0}
    with pytest.raises(ValueError, match=r"grpo.num_generations = '8': input should be a valid"):
        load_config(TINY_CONFIG, grpo={"num_generations": "8"})


def test_a_plan_prints_as_the_command_does(cfg, capsys):
    planned = plan(cfg, gpu="h200", gpus=4, rollout={"num_engines": 2})
    assert planned.figures.num_gpus == 4
    print_plan(planned.job.cfg, gpu="h200", num_gpus=4, lengths_file=None, as_json=False)
    assert capsys.readouterr().out == f"{planned}\n"
