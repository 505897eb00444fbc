"""Faults inside a rank, for `jobs.Job`: a deed, the place, and the rank.

A rank is a forked process, so patches affect that rank only. Every fault can be pickled.
"""

import ctypes
import importlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from megatron_grpo.timing import PhaseTimer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    """Exit silently with the exit code of success."""
    os._exit(0)


def crash() -> None:
    """Read from an invalid address."""
    ctypes.string_at(0)


def fail() -> None:
    raise RuntimeError("planted failure")


def refuse() -> None:
    raise ValueError("planted refusal")


def lack_memory() -> None:
    raise MemoryError("planted lack of memory")


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    """Hang in C, where Python handles no signal; in a loop, since a signal ends one call."""
    while True:
        ctypes.CDLL(None).sleep(1000)


@dataclass(frozen=True)
class InPhase:
    """Run `deed` when `rank` enters `phase` for the `nth` time."""

    deed: Callable[[], None]
    rank: int
    phase: str
    nth: int = 2

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        original, entries = PhaseTimer.phase, 0

        @contextmanager
        def phase(timer: PhaseTimer, name: str, *part: str) -> Any:
            nonlocal entries
            entries += name == self.phase
            with original(timer, name, *part):
                if name == self.phase and entries == self.nth:
                    self.deed()
                yield

        PhaseTimer.phase = phase


@dataclass(frozen=True)
class InCall:
    """Run `deed` in `rank` just before its `nth` call of `function` of `module`."""

    deed: Callable[[], None]
    rank: int
    module: str
    function: str
    nth: int = 1

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        module = importlib.import_module(self.module)
        original, calls = getattr(module, self.function), 0

        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                self.deed()
            return original(*args, **kwargs)

        setattr(module, self.function, function)


def slowly() -> None:
    """Sleep long enough for a test to send a signal."""
    time.sleep(1.0)


def stop_and_linger() -> None:
    """Stop until a test resumes this process, then take a minute."""
    stop()
    time.sleep(60.0)


def preempt() -> None:
    """Preempt this rank, then sleep until every rank must have noticed."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)


@dataclass(frozen=True)
class Both:
    """Two faults in one job."""

    first: InPhase
    second: InPhase

    def __call__(self, rank: int) -> None:
        self.first(rank)
        self.second(rank)


def slower_than_any_limit() -> None:
    """Sleep longer than the limits of a test that lowers them to `LIMIT` seconds."""
    time.sleep(LIMIT + 2.0)


LIMIT = 8.0


@dataclass(frozen=True)
class WithoutMargin:
    """Remove the margin added to time limits, then apply `then`."""

    then: InCall

    def __call__(self, rank: int) -> None:
        importlib.import_module("megatron_grpo.watchdog.job").MARGIN_SECONDS = 0.0
        self.then(rank)


@dataclass(frozen=True)
class SpoilGradient:
    """Make `rank`'s gradient of an MLP NaN in `steps`, counted from 1 since the process started."""

    rank: int
    steps: tuple[int, ...]

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        train = importlib.import_module("megatron_grpo.trainer")
        original, step = train.train_step, 0

        def train_step(policy: Any, *args: Any) -> Any:
            nonlocal step
            step += 1
            if step not in self.steps:
                return original(policy, *args)
            parameter = policy.parameters()["0.decoder.layers.0.mlp.linear_fc2.weight"]
            hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
            metrics = original(policy, *args)
            hook.remove()
            return metrics

        train.train_step = train_step


@dataclass(frozen=True)
class ListForwards:
    """Make every rank write a line to `file` per forward pass and per tick of its watchdog."""

    file: Path

    def __call__(self, rank: int) -> None:
        gpt = importlib.import_module("megatron.core.models.gpt").GPTModel
        watchdog = importlib.import_module("megatron_grpo.watchdog").Watchdog
        tick = watchdog.tick

        def write(word: str) -> None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{word}\n")

        def ticking(self: Any, *_: Any) -> None:
            write("tick")
            tick(self)

        watchdog.tick = ticking
        register_module_forward_pre_hook(
            lambda module, _: write("forward") if isinstance(module, gpt) else None
        )
