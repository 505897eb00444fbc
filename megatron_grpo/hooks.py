"""Hooks of a run: classes of users, whose methods rank 0 calls in its own process."""

import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.config.train import Hook
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.workers.user_file import (
    error_text,
    is_refusal,
    load_function,
    select_accepted,
)

METHODS = {
    "on_step_end": ("step", "metrics"),
    "on_evaluation": ("step", "metrics"),
    "on_checkpoint": ("step", "folder"),
}
"""Methods of a hook, with their parameters; all are optional."""


class HookError(RuntimeError):
    """A hook has raised an exception, or returned what cannot be understood; the text names it."""


def load_hook(hook: Hook, cfg: Config) -> Callable[[], Any]:
    """Import `file.py:ClassName`; the result makes an instance. Raises ValueError unless its
    methods can be called. A parameter `run_dir` of the class gets the run directory."""
    found = load_function(hook.name, "file of a hook")
    if not inspect.isclass(found):
        raise ValueError(f"train.hooks {hook.name} is no class")
    methods = [each for each in dir(found) if each.startswith("on_")]
    unknown = [each for each in methods if each not in METHODS]
    if unknown or not methods:
        raise ValueError(
            f"train.hooks {hook.name}: a hook has one or more of the methods {', '.join(METHODS)}, "
            f"and this class has {', '.join(unknown) or 'none of them'}"
        )
    if methods == ["on_evaluation"] and not cfg.eval.named_sets:
        raise ValueError(
            f"train.hooks {hook.name} has on_evaluation alone, and nothing is evaluated: name "
            "held-out prompts, such as eval.data.path=FILE"
        )
    for method in methods:
        try:
            inspect.signature(getattr(found, method)).bind(None, *METHODS[method])
        except TypeError:
            wanted = ", ".join(("self", *METHODS[method]))
            raise ValueError(f"{method} of {hook.name} must take ({wanted})") from None
    signature = inspect.signature(found)
    given = select_accepted({"run_dir": cfg.train.run_dir}, signature.parameters) | hook.arguments
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(f"arguments {hook.arguments} of {hook.name}: {error}") from None
    return lambda: found(**given)


class Hooks:
    """The hooks of a run, on rank 0."""

    def __init__(self, cfg: Config) -> None:
        self._hooks: list[tuple[Hook, Any]] = []
        for hook in cfg.train.hooks:
            make = load_hook(hook, cfg)
            with _named(f"train.hooks {hook.name}"):
                self._hooks.append((hook, make()))
        self.stopped_by: Hook | None = None
        """The first hook that wants the run to end."""

    def call(
        self, method: str, step: int, given: Mapping[str, float] | Path, timer: PhaseTimer
    ) -> None:
        """Call `method` of the hooks that have it, each in a phase of its own name.

        Raises HookError for an exception, and for a result that is neither true nor false nor None.
        """
        for hook, instance in self._hooks:
            if not hasattr(instance, method):
                continue
            where = f"{method} of train.hooks {hook.name}, after step {step}"
            with timer.phase("hooks", hook.label), _named(where):
                stops = getattr(instance, method)(step, given)
                if stops not in (None, False, True):
                    raise ValueError(
                        f"returned {reprlib.repr(stops)}: return True to end the run, or nothing"
                    )
            if stops:
                self.stopped_by = self.stopped_by or hook


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Raise HookError with `where` for an exception of a hook's code."""
    try:
        yield
    except Exception as error:
        text = f" {error}" if is_refusal(error) else f"\n{error_text(error, 'this host')}"
        raise HookError(f"{where}:{text}") from error
