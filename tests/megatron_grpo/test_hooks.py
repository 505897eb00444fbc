"""Classes of users that rank 0 calls: what is refused, and what a call does."""

import json
import re
from pathlib import Path

import pytest

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.config import Config
from megatron_grpo.config.file import load_config
from megatron_grpo.hooks import HookError, Hooks, load_hook
from megatron_grpo.timing import PhaseTimer

FILE = """
class Notes:
    def __init__(self, run_dir, stop_at=3):
        self.file, self.stop_at = run_dir / "notes", stop_at

    def on_step_end(self, step, metrics):
        with self.file.open("a") as file:
            file.write(f"{step} {metrics['loss']} ")
        return step == self.stop_at

class Broken:
    def on_step_end(self, step, metrics):
        return {} if step == 1 else metrics["lost"]

class Idle:
    def wait(self): ...

class OfTransformers:
    def on_evaluate(self, step, metrics): ...

class Short:
    def on_checkpoint(self, folder): ...

class Evaluates:
    def on_evaluation(self, step, metrics): ...
"""


@pytest.fixture
def config(tmp_path):
    """A run with classes of `FILE` as hooks; `{Notes}` becomes its name."""
    file = tmp_path / "mine.py"
    file.write_text(FILE)

    def make(hooks: str, *overrides: str) -> Config:
        named = re.sub(r"\{(\w+)\}", rf"{file}:\1", hooks)
        return load_config(
            TINY_CONFIG, [f"train.run_dir={tmp_path}", f"train.hooks=[{named}]", *overrides]
        )

    return make


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("{Nobody}", "or class 'Nobody'"),
        ("{Idle}", "on_evaluation, on_checkpoint, and this class has none of them"),
        ("{OfTransformers}", "on_evaluation, on_checkpoint, and this class has on_evaluate"),
        ("{Short}", "mine.py:Short must take (self, step, folder)"),
        ("{Evaluates}", "nothing is evaluated: name held-out prompts"),
        ("'{name: NOTES, arguments: {stop: 3}}'", "got an unexpected keyword argument 'stop'"),
    ],
)
def test_a_hook_that_could_not_be_called_is_refused(config, tmp_path, hook, error):
    cfg = config(hook.strip("'").replace("NOTES", f"{tmp_path / 'mine.py'}:Notes"))
    with pytest.raises(ValueError) as refused:
        load_hook(cfg.train.hooks[0], cfg)
    assert error in str(refused.value)


def test_a_file_that_fails_is_named_with_its_line(config, tmp_path):
    cfg = config("{Notes}")
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    with pytest.raises(
        ValueError, match=r"file of a hook \S+mine.py:Notes cannot be imported"
    ) as refused:
        load_hook(cfg.train.hooks[0], cfg)
    assert "line 1, in <module>\n    import no_such_package\n" in str(refused.value)


def test_hooks_are_called_with_what_they_take_and_true_ends_the_run(config, tmp_path):
    hooks, phases = Hooks(config("{Notes}")), []
    for step in (1, 2, 3):
        assert hooks.stopped_by is None
        hooks.call("on_step_end", step, {"loss": 0.5}, PhaseTimer(phases.append))
        hooks.call("on_checkpoint", step, tmp_path, PhaseTimer(phases.append))
    assert (tmp_path / "notes").read_text() == "1 0.5 2 0.5 3 0.5 "
    assert phases == ["hooks_Notes", ""] * 3, "named for the watchdog and the timeline"
    assert hooks.stopped_by and hooks.stopped_by.label == "Notes"


@pytest.mark.parametrize(
    ("step", "error"),
    [(1, " returned {}: return True to end the run"), (2, "\nTraceback .*line 13, .*'lost'$")],
)
def test_a_hook_that_fails_is_named_with_its_file(config, step, error):
    with pytest.raises(HookError, match=f"(?s)after step {step}:{error}") as raised:
        Hooks(config("{Broken}")).call("on_step_end", step, {}, PhaseTimer(lambda phase: None))
    assert re.match(r"on_step_end of train.hooks \S+mine.py:Broken", str(raised.value))
    assert "megatron_grpo/hooks.py" not in str(raised.value)


def test_the_early_stopping_of_the_docs_counts_evaluations_without_a_gain(tmp_path):
    (shown,) = re.findall(r"```python\n(.*?)```", Path("docs/hooks.md").read_text(), re.DOTALL)
    (tmp_path / "early.py").write_text(shown)
    hook = f"{{name: {tmp_path / 'early.py'}:Patience, arguments: {{patience: 2}}}}"
    overrides = [f"train.hooks=[{hook}]", f"train.run_dir={tmp_path}", "eval.data={}"]
    cfg = load_config(TINY_CONFIG, [*overrides, "eval.pass_threshold=1.0"])
    asked = []
    for step, value in enumerate([0.1, 0.3, 0.2, 0.4, 0.4, 0.3]):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval/pass@1": value}) + "\n")
        patience = load_hook(cfg.train.hooks[0], cfg)()  # as after a resume
        asked.append(patience.on_evaluation(step, {}))
    assert asked == [False, False, False, False, False, True]
