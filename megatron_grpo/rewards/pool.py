"""Scoring in worker processes, with limits of time and memory."""

import json
import os
import reprlib
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from megatron_grpo.config import RewardConfig
from megatron_grpo.rewards import supervisor

if TYPE_CHECKING:
    from megatron_grpo.rollout import Sample

SHORTENED = reprlib.Repr()
SHORTENED.maxstring = 200
END_SECONDS = 10.0
"""A supervisor that takes longer to kill what is below it is itself killed."""
DEATH_SECONDS = 2.0
"""How long after a worker's last word its death is waited for."""


class RewardError(ValueError):
    """A reward function failed, the text names it and the prompt; or it cannot be used."""


class ScoringGivenUp(Exception):
    """`RewardPool.cancel` was called; nothing has failed."""


@dataclass(frozen=True)
class _Worker:
    supervisor: subprocess.Popen[bytes]
    """Ends as the worker ends, and with it all that the worker has started."""
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

    They start at once and load in the background; they die with this process, however it ends, and
    so does what they have started. A function has the rights of the user who trains: limits of time
    and memory are no sandbox.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self.cfg = cfg
        self._load_deadline = time.monotonic() + cfg.timeout
        self._workers = [_start_worker(cfg) for _ in range(cfg.num_workers)]
        self._loading = list(self._workers)
        self._given_up, self._give_up = Pipe(duplex=False)

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until the functions are loaded, and see that the data has what they want.

        `rows` are those of all prompts that will come. Raises RewardError, and closes the pool, for
        a function that is not loaded `reward.timeout` seconds after the start or that wants a
        column that some row lacks.
        """
        while self._loading:
            wanted = self._loaded_columns(self._loading.pop())
            for function, names in zip(self.cfg.functions, wanted, strict=True):
                for name in names:
                    lacking = [row for row in rows if name not in row]
                    if lacking:
                        self.close()
                        raise RewardError(
                            f"reward function {function.label} wants {name!r}: not in its "
                            f"arguments {function.arguments}, and no column of {len(lacking)} of "
                            f"{len(rows)} rows; the first of them has {', '.join(lacking[0])}"
                        )

    def score(self, samples: Sequence["Sample"]) -> list[dict[str, float]]:
        """Scores of every sample by function label. Samples of one prompt must be neighbours.

        Raises RewardError, and closes the pool, when a call raises, ends late, takes too much
        memory, kills its process or returns anything but one finite number per completion. Raises
        ScoringGivenUp once `cancel` was called: the pool is good for nothing then but `close`.
        """
        assert self._workers, "the pool is closed"
        self.wait_ready([sample.prompt.row for sample in samples])
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

    def cancel(self) -> None:
        """End a running `score` soon; from any thread."""
        self._give_up.send_bytes(b"!")

    def close(self) -> None:
        """Kill the workers; nothing of them is left when this returns."""
        for worker in self._workers:
            worker.supervisor.send_signal(supervisor.END)
        for worker in self._workers:
            try:
                worker.supervisor.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.supervisor.kill()
                worker.supervisor.wait()
            worker.connection.close()
        self._workers.clear()

    def _loaded_columns(self, worker: _Worker) -> list[list[str]]:
        names = ", ".join(function.name for function in self.cfg.functions)
        if not self._wait([worker.connection], self._load_deadline):
            self.close()
            raise RewardError(f"reward functions {names} not loaded after {self.cfg.timeout} s")
        ok, answer = self._receive(worker)
        if not ok:
            self.close()
            raise RewardError(f"reward functions {names} cannot be loaded: {answer}")
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
            raise self._failure(call, self._cause_of_death(worker)) from None
        except BlockingIOError:
            cause = f"its process did not read the call in {self.cfg.timeout} s: killed"
            raise self._failure(call, cause) from None
        return _Running(worker, call, deadline=time.monotonic() + self.cfg.timeout)

    def _ended(self, running: Sequence[_Running]) -> list[_Running]:
        """Wait for at least one answer; a missed deadline is an error."""
        first = min(running, key=lambda one: one.deadline)
        ready = self._wait([one.worker.connection for one in running], first.deadline)
        if not ready:
            raise self._failure(first.call, f"no result after {self.cfg.timeout} s: killed")
        return [one for one in running if one.worker.connection in ready]

    def _wait(self, connections: Sequence[Connection], deadline: float) -> list[Any]:
        """Those of `connections` that have something to read; none when that is late."""
        timeout = max(0.0, deadline - time.monotonic())
        ready = wait([self._given_up, *connections], timeout)
        if self._given_up in ready:
            raise ScoringGivenUp("the scoring was given up")
        return ready

    def _result(self, ended: _Running) -> list[float]:
        ok, answer = self._receive(ended.worker)
        if not ok:
            raise self._failure(ended.call, answer)
        scores: list[float] = answer
        return scores

    def _receive(self, worker: _Worker) -> tuple[bool, Any]:
        """The worker's next answer: (True, result) or (False, what went wrong)."""
        try:
            ok, answer = json.loads(worker.connection.recv_bytes())
            return ok, answer
        except (EOFError, ConnectionError):
            return False, self._cause_of_death(worker)

    def _cause_of_death(self, worker: _Worker) -> str:
        try:
            code = worker.supervisor.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process has closed the connection to the trainer"
        if code >= 0:
            return f"its process died with exit code {code}"
        return (
            f"its process died with signal {signal.Signals(-code).name} "
            f"(reward.memory_megabytes was {self.cfg.memory_megabytes})"
        )

    def _failure(self, call: _Call, cause: str) -> RewardError:
        self.close()
        prompt = call.samples[call.places[0]].prompt
        return RewardError(
            f"reward function {self.cfg.functions[call.function].label} on prompt {prompt.index} "
            f"({SHORTENED.repr(prompt.text)}): {cause}"
        )


def _start_worker(cfg: RewardConfig) -> _Worker:
    """A fresh interpreter rather than a fork: it holds neither torch nor the trainer's threads."""
    connection, theirs = Pipe()
    module = "megatron_grpo.rewards.worker"
    arguments = [os.getpid(), theirs.fileno(), cfg.memory_megabytes, module]
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, *map(str, arguments)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
    )
    theirs.close()
    _limit_sends(connection, cfg.timeout)
    connection.send(cfg.functions)
    return _Worker(process, connection)


def _limit_sends(connection: Connection, seconds: float) -> None:
    """Have the kernel end a send that gets no further for `seconds` with BlockingIOError.

    A call may be larger than what the kernel takes from us while the worker reads nothing.
    """
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _calls(samples: Sequence["Sample"], num_functions: int) -> list[_Call]:
    groups = groupby(range(len(samples)), key=lambda place: samples[place].prompt.index)
    return [
        _Call(function, places, samples)
        for places in [list(group) for _, group in groups]
        for function in range(num_functions)
    ]
