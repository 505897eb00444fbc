"""Scoring in worker processes, with a time limit per call."""

import os
import reprlib
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from megatron_grpo import parent_death
from megatron_grpo.config import RewardConfig, RewardFunction

if TYPE_CHECKING:
    from megatron_grpo.rollout import Sample

SHORTENED = reprlib.Repr()
SHORTENED.maxstring = 200


class RewardError(ValueError):
    """A reward function failed; the text names the function and the prompt."""


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(frozen=True)
class _Call:
    """One function on the completions of one prompt; `places` are theirs in the batch."""

    function: int
    places: Sequence[int]
    samples: Sequence["Sample"]


@dataclass(frozen=True)
class _Running:
    worker: _Worker
    call: _Call
    deadline: float


class RewardPool:
    """Processes that run the config's reward functions, one call per prompt and function.

    They start at once and load in the background; they die with this process, however it ends.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self.cfg = cfg
        self._load_deadline = time.monotonic() + cfg.timeout
        self._workers = [_start_worker(cfg.functions) for _ in range(cfg.num_workers)]
        self._loading = list(self._workers)

    def wait_ready(self, columns: Collection[str]) -> None:
        """Wait until the functions are loaded, and see that the data has what they want.

        `columns` are the names in a prompt's row. Raises ValueError, and closes the pool, for a
        function that is not loaded `reward.timeout` seconds after the start or that wants a column
        that is not there.
        """
        while self._loading:
            wanted = self._loaded_columns(self._loading.pop())
            for function, names in zip(self.cfg.functions, wanted, strict=True):
                missing = [name for name in names if name not in columns]
                if missing:
                    self.close()
                    raise ValueError(
                        f"reward function {function.label} wants {', '.join(map(repr, missing))}: "
                        f"neither in its arguments {function.arguments} nor a column of the data "
                        f"({', '.join(columns)})"
                    )

    def score(self, samples: Sequence["Sample"]) -> list[dict[str, float]]:
        """Scores of every sample by function label. Samples of one prompt must be neighbours.

        Raises RewardError, and closes the pool, when a call raises, ends late, kills its process or
        returns anything but one finite number per completion.
        """
        assert self._workers, "the pool is closed"
        self.wait_ready(samples[0].prompt.row)
        calls = deque(_calls(samples, len(self.cfg.functions)))
        scores: list[dict[str, float]] = [{} for _ in samples]
        idle, running = list(self._workers), list[_Running]()
        while calls or running:
            while calls and idle:
                running.append(self._begin(idle.pop(), calls.popleft()))
            for done in self._ended(running):
                label = self.cfg.functions[done.call.function].label
                for place, score in zip(done.call.places, self._result(done), strict=True):
                    scores[place][label] = score
                running.remove(done)
                idle.append(done.worker)
        return scores

    def close(self) -> None:
        """Kill the workers; nothing of them is left when this returns."""
        for worker in self._workers:
            # The worker leads its own session: what its functions started goes with it.
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            worker.connection.close()
        self._workers.clear()

    def _loaded_columns(self, worker: _Worker) -> list[list[str]]:
        names = ", ".join(function.name for function in self.cfg.functions)
        if not worker.connection.poll(max(0.0, self._load_deadline - time.monotonic())):
            self.close()
            raise ValueError(f"reward functions {names} not loaded after {self.cfg.timeout} s")
        ok, answer = _receive(worker)
        if not ok:
            self.close()
            raise ValueError(f"reward functions {names} cannot be loaded: {answer}")
        columns: list[list[str]] = answer
        return columns

    def _begin(self, worker: _Worker, call: _Call) -> _Running:
        completions = [call.samples[place].text for place in call.places]
        prompt = call.samples[call.places[0]].prompt
        prompts = [prompt.text] * len(completions)
        columns = {name: [value] * len(completions) for name, value in prompt.row.items()}
        try:
            worker.connection.send((call.function, completions, prompts, columns))
        except ConnectionError:
            raise self._failure(call, _cause_of_death(worker)) from None
        return _Running(worker, call, deadline=time.monotonic() + self.cfg.timeout)

    def _ended(self, running: Sequence[_Running]) -> list[_Running]:
        """Wait for at least one answer; a missed deadline is an error."""
        first = min(running, key=lambda one: one.deadline)
        ready = wait(
            [one.worker.connection for one in running],
            timeout=max(0.0, first.deadline - time.monotonic()),
        )
        if not ready:
            raise self._failure(first.call, f"no result after {self.cfg.timeout} s: killed")
        return [one for one in running if one.worker.connection in ready]

    def _result(self, ended: _Running) -> list[float]:
        ok, answer = _receive(ended.worker)
        if not ok:
            raise self._failure(ended.call, answer)
        scores: list[float] = answer
        return scores

    def _failure(self, call: _Call, cause: str) -> RewardError:
        self.close()
        prompt = call.samples[call.places[0]].prompt
        return RewardError(
            f"reward function {self.cfg.functions[call.function].label} on prompt {prompt.index} "
            f"({SHORTENED.repr(prompt.text)}): {cause}"
        )


def _start_worker(functions: Sequence[RewardFunction]) -> _Worker:
    """A fresh interpreter rather than a fork: it holds neither torch nor the trainer's threads."""
    connection, theirs = Pipe()
    wrapper = [sys.executable, parent_death.__file__, str(os.getpid())]
    command = [sys.executable, "-m", "megatron_grpo.rewards.worker", str(theirs.fileno())]
    process = subprocess.Popen(
        [*wrapper, *command],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
    )
    theirs.close()
    connection.send(functions)
    return _Worker(process, connection)


def _receive(worker: _Worker) -> tuple[bool, Any]:
    """The worker's next answer: (True, result) or (False, what went wrong)."""
    try:
        answer: tuple[bool, Any] = worker.connection.recv()
        return answer
    except (EOFError, ConnectionError):
        return False, _cause_of_death(worker)


def _cause_of_death(worker: _Worker) -> str:
    code = worker.process.wait()
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its process died with {cause}"


def _calls(samples: Sequence["Sample"], num_functions: int) -> list[_Call]:
    groups = groupby(range(len(samples)), key=lambda place: samples[place].prompt.index)
    return [
        _Call(function, places, samples)
        for places in [list(group) for _, group in groups]
        for function in range(num_functions)
    ]
