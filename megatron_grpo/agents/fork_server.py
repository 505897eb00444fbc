"""Process that environments and agents are forked from: `python -m MODULE FD MEGABYTES`.

It reads (section, class, arguments, timeout) from the socket FD, loads the class, answers with the
columns that the first method requires, and then executes commands, any number at a time:

    ("begin", key, seed, prompt, columns)    fork a process, make instance `key` in it, and call
                                             `reset`, or `run_episode` of an agent
    ("step", key, text, turn)                call `step` of the instance
    ("end", key)                             kill the instance

Answers are [key, true, result] or [key, false, error text] in JSON, so that nothing from user code
is unpickled. An instance that fails or is late is killed. All instances end when the socket closes.
"""

import gc
import inspect
import json
import os
import random
import reprlib
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NoReturn

from megatron_grpo.agents.fork_pool import LOAD_KEY
from megatron_grpo.launch.parent_death import adopt_orphans, die_with_parent, kill_tree
from megatron_grpo.unicode import as_unicode
from megatron_grpo.workers.supervised import attempt, begin_worker, limit_sends
from megatron_grpo.workers.user_file import (
    death_text,
    finite_number,
    load_user_file,
    required_parameters,
    select_accepted,
)
from parallel.clock import TICK, RunningClock

MAX_CHARACTERS = 1 << 20
"""Limit of an observation: no model's context holds more."""
TURN = ("token_ids", "finish_reason", "tokens_left")
"""Optional parameters of `step`, after the text of the turn."""


@dataclass(frozen=True)
class LoadedClass:
    """A class of environments, or `Actor`, with the arguments of the config."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any]
    first: str
    """Method to call first: `reset`, or `run_episode`, the only method of an agent."""
    parameters: Mapping[str, inspect.Parameter]
    """Parameters of the first method."""

    @classmethod
    def load(cls, name: str, arguments: Mapping[str, Any]) -> "LoadedClass":
        """Import `file.py:ClassName` and call its `load`; raises ValueError if it cannot be used as
        an environment or an agent."""
        path, _, class_name = name.rpartition(":")
        found = getattr(load_user_file(Path(path), "file of an environment"), class_name, None)
        if not inspect.isclass(found):
            raise ValueError(f"{path} has no class {class_name!r}")
        methods = ("run_episode",) if hasattr(found, "run_episode") else ("reset", "step")
        for method in methods:
            if not callable(getattr(found, method, None)):
                raise ValueError(f"{name} has no method {method}")
        try:
            inspect.signature(found).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"environment.arguments {dict(arguments)} of {name}: {error}"
            ) from None
        # Looked up in the class, only a classmethod is bound: a plain method has no instance yet.
        if inspect.ismethod(load := getattr(found, "load", None)):
            load(**arguments)
        step = getattr(found, "step", None)
        besides_text = _parameters(step, skip=2) if step and "step" in methods else {}
        for parameter in required_parameters(besides_text):
            if parameter not in TURN:
                raise ValueError(
                    f"step of {name} requires {parameter!r}: besides the text it may take "
                    f"{', '.join(TURN)}"
                )
        parameters = _parameters(getattr(found, methods[0]), skip=1)
        return cls(found, arguments, methods[0], parameters)

    def begin(self, prompt: str, columns: Mapping[str, Any]) -> tuple[Any, Any]:
        """Make an instance and call its first method; returns both. The result is the text of
        `reset`, or the outcome of an agent's episode."""
        given = select_accepted({**columns, "prompt": prompt}, self.parameters)
        instance = self.make(**self.arguments)
        found = getattr(instance, self.first)(**given)
        is_text = self.first == "reset" and found is not None
        return instance, _text("reset", found) if is_text else found


def step(environment: Any, text: str, turn: Mapping[str, Any]) -> tuple[str, float, bool]:
    """Call `step` with the values of `turn` that it accepts; returns (observation, reward, done),
    and raises ValueError for any other result."""
    answer = environment.step(text, **select_accepted(turn, _parameters(environment.step, skip=1)))
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise ValueError(
            f"step returned {reprlib.repr(answer)} instead of (observation, reward, done)"
        )
    observation, reward, done = answer
    text, number = _text("step", observation), finite_number(reward)
    if number is None:
        raise ValueError(f"step returned the reward {reprlib.repr(reward)}: not a finite number")
    if isinstance(done, str) or done not in (True, False):
        raise ValueError(f"step returned done = {reprlib.repr(done)}: neither true nor false")
    return text, number, bool(done)


def _parameters(method: Callable[..., Any], *, skip: int) -> dict[str, inspect.Parameter]:
    return dict(islice(inspect.signature(method).parameters.items(), skip, None))


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise ValueError(
            f"{method} returned the observation {reprlib.repr(observation)}: not a text"
        )
    if len(observation) > MAX_CHARACTERS:
        raise ValueError(
            f"{method} returned an observation of {len(observation)} characters: "
            f"at most {MAX_CHARACTERS}"
        )
    return as_unicode(observation)


DEATH_SECONDS = 0.5
"""Seconds to wait for an instance's death after its connection has closed."""
SEND_SECONDS = 5.0
"""Limit of a send to an instance. Turns beyond the socket's buffer block until it reads, and all
other instances wait meanwhile."""
REAP_SECONDS = 0.05
"""Seconds between checks whether a killed process is gone."""


@dataclass
class InstanceProcess:
    """Process and connection of an instance."""

    pid: int
    connection: Connection


class ForkWorker:
    """Executes the trainer's commands; holds the processes of all instances by key."""

    def __init__(self, trainer: Connection, memory_megabytes: int) -> None:
        self.trainer, self._memory_megabytes = trainer, memory_megabytes
        self.processes: dict[int, InstanceProcess] = {}
        self.deadlines: OrderedDict[int, float] = OrderedDict()
        """Deadline (of `clock`) of each call in progress, by key. All calls have the same timeout,
        so insertion order is the order of deadlines, and no event walks over all instances."""
        self.clock = RunningClock()
        """Not `running_time`, which starts a thread: this process forks."""
        self.failures: dict[int, str] = {}
        """Reason why an instance ended between two calls, by key; the next call gets it."""
        self.selector = DefaultSelector()
        self.selector.register(trainer, EVENT_READ)
        self.killed: list[int] = []
        """Pids of killed processes that are not reaped yet."""

    def serve(self) -> None:
        """Load the class and run instances until the trainer closes the socket."""
        self.section, name, arguments, self.timeout = self.trainer.recv()
        self.limit = f"{self.section}.memory_megabytes {self._memory_megabytes}"
        is_loaded, loaded = attempt(lambda: LoadedClass.load(name, arguments), self.limit)
        if not is_loaded:
            self._answer(LOAD_KEY, False, loaded)
            return
        columns = [name for name in required_parameters(loaded.parameters) if name != "prompt"]
        self._answer(LOAD_KEY, True, columns)
        self.loaded: LoadedClass = loaded
        # The collector writes into objects that it visits, which would copy their pages in every
        # fork; frozen objects are not visited.
        gc.freeze()
        with suppress(EOFError):
            while True:
                self._handle_events()

    def _handle_events(self) -> None:
        now = self.clock.now()
        # At most TICK: `RunningClock` counts a longer gap as time in which the job was stopped.
        wake_ups = [min(deadline - now, TICK) for deadline in islice(self.deadlines.values(), 1)]
        if self.killed:
            wake_ups.append(REAP_SECONDS)
        seconds = max(0.0, min(wake_ups)) if wake_ups else None
        ready = [key.data for key, _ in self.selector.select(seconds)]
        # Answers first: an answer that has come is not late. Commands last, since "end" removes an
        # instance whose answer may be in `ready`.
        for key in ready:
            if key is not None:  # None is the trainer's connection
                self._forward_answer(key)
        now = self.clock.now()
        for key in [*takewhile(lambda key: self.deadlines[key] < now, self.deadlines)]:
            self._fail(key, f"no answer after {self.timeout:g} s ({self.section}.timeout): killed")
        if None in ready:
            self._execute(*self.trainer.recv())
        self.killed = [pid for pid in self.killed if os.waitpid(pid, os.WNOHANG) == (0, 0)]

    def _execute(self, action: str, key: int, *what: Any) -> None:
        if action == "begin":
            try:
                process = self.processes[key] = self._fork(*what)
            except OSError as error:
                self._answer(key, False, f"its process could not be started: {error}")
            else:
                self.selector.register(process.connection, EVENT_READ, key)
                self.deadlines[key] = self.clock.now() + self.timeout
        elif action == "step":
            self._step(key, *what)
        else:
            self.failures.pop(key, None)
            if key in self.processes:  # a failed instance is killed already
                self._kill(key)

    def _step(self, key: int, *turn: Any) -> None:
        if key in self.failures:
            self._answer(key, False, self.failures[key])
            return
        self.deadlines[key] = self.clock.now() + self.timeout
        try:
            self.processes[key].connection.send(turn)
        except BlockingIOError:
            self._fail(key, f"its process did not read the turn within {SEND_SECONDS:g} s: killed")
        except ConnectionError:
            pass  # the instance is dead: `_forward_answer` finds that out and says how

    def _fork(self, seed: int, prompt: str, columns: Any) -> InstanceProcess:
        connection, theirs = Pipe()
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            self._run_instance(
                theirs, parent, connection, partial(self._reset, seed, prompt, columns)
            )
        theirs.close()  # else the death of the instance would not close the connection
        limit_sends(connection, SEND_SECONDS)
        return InstanceProcess(pid, connection)

    def _reset(self, seed: int, prompt: str, columns: Any) -> Any:
        """Make the instance of this process; returns the result of its first method."""
        random.seed(seed)
        if "numpy" in sys.modules:  # forks would share the state of its generator
            sys.modules["numpy"].random.seed(seed % 2**32)
        self.environment, observation = self.loaded.begin(prompt, columns)
        return observation

    def _run_instance(
        self,
        worker: Connection,
        parent: int,
        other_end: Connection,
        action: Callable[[], Any],
    ) -> NoReturn:
        """Run an instance in its own process: `action` first, then `step` for each turn."""
        die_with_parent()
        if os.getppid() != parent:  # the parent died before `die_with_parent`
            os._exit(1)
        os.setsid()  # user code that signals its process group must not reach other instances
        adopt_orphans()  # so that `kill_tree` finds the processes that it starts
        # Inherited sockets: other instances would not see their connections close.
        self.selector.close()
        for unused in (self.trainer, other_end, *(p.connection for p in self.processes.values())):
            unused.close()
        with suppress(EOFError, ConnectionError):
            while True:
                worker.send_bytes(json.dumps(attempt(action, self.limit)).encode())
                # Before `self.environment`, which a failed reset has not set; then no turn comes.
                turn = worker.recv()
                action = partial(step, self.environment, *turn)
        os._exit(0)  # not `return`: this is a fork of the worker, in the middle of its loop

    def _forward_answer(self, key: int) -> None:
        process = self.processes[key]
        try:
            is_good, answer = json.loads(process.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._fail(key, self._cause_of_death(process))
            return
        if is_good:
            del self.deadlines[key]
            self._answer(key, True, answer)
        else:
            self._fail(key, answer)

    def _cause_of_death(self, process: InstanceProcess) -> str:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # WNOWAIT: `_handle_events` reaps it
        deadline = self.clock.now() + DEATH_SECONDS
        while (end := os.waitid(os.P_PID, process.pid, how)) is None:
            if self.clock.now() > deadline:
                return death_text(None, self.limit)
            time.sleep(0.002)
        is_exit = end.si_code == os.CLD_EXITED
        return death_text(end.si_status if is_exit else -end.si_status, self.limit)

    def _fail(self, key: int, text: str) -> None:
        is_at_work = key in self.deadlines
        self._kill(key)
        if is_at_work:
            self._answer(key, False, text)
        else:
            self.failures[key] = text

    def _kill(self, key: int) -> None:
        process = self.processes.pop(key)
        self.deadlines.pop(key, None)
        self.selector.unregister(process.connection)
        process.connection.close()
        kill_tree(process.pid)
        with suppress(ProcessLookupError):  # an instance that was dead may have left its group
            os.killpg(process.pid, signal.SIGKILL)
        self.killed.append(process.pid)

    def _answer(self, key: int, is_good: bool, result: Any) -> None:
        self.trainer.send_bytes(json.dumps([key, is_good, result]).encode())


if __name__ == "__main__":
    ForkWorker(*begin_worker()).serve()
