"""The trainer's side of environments and agents: any number at a time, one future for each call."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron_grpo.config.reward import EnvironmentConfig
from megatron_grpo.workers.supervised import SupervisedWorker, load_seconds
from megatron_grpo.workers.tasks import lasting_future
from megatron_grpo.workers.user_file import missing_column
from parallel.clock import result_within

WORKER_MODULE = "megatron_grpo.agents.fork_server"
LOAD_KEY = -1
"""Key of the answer that the class is loaded, in place of an instance's key."""
DEATH_SECONDS = 30.0
"""Time for the worker to die after its connection has closed: it has a process for each sample."""
SEND_SECONDS = 10
"""Limit of a send: the worker reads continuously, so a longer one means that it is broken."""


class InstanceFailed(Exception):
    """A call failed or was late, with the reason; no other sample is affected."""


class InstancesLost(RuntimeError):
    """The process that instances are forked from is gone, and all instances with it."""


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn of the model."""

    observation: str
    reward: float
    done: bool


class ForkPool:
    """A worker process that loads a class, and forks one process with an instance (an environment
    or an agent) for each sample. Errors name keys of the config's `section` and call the class
    `what`."""

    def __init__(
        self, cfg: EnvironmentConfig, section: str = "environment", what: str = ""
    ) -> None:
        self.cfg = cfg
        self._what = what or f"environment {cfg.name}"
        self._keys = count()
        self._lock = threading.Lock()
        """Guards `_calls` and `_failure`, which the reader thread changes. Sends need no lock: only
        one thread sends."""
        self._calls: dict[int, Future[Any]] = {LOAD_KEY: lasting_future()}
        self._loaded = self._calls[LOAD_KEY]
        self._failure = ""
        """Why the worker is gone; empty while it works."""
        self._worker = SupervisedWorker(
            WORKER_MODULE,
            memory_megabytes=cfg.memory_megabytes,
            memory_key=f"{section}.memory_megabytes",
            send_seconds=SEND_SECONDS,
        )
        self._worker.connection.send((section, cfg.name, cfg.arguments, cfg.timeout))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until the class is loaded.

        Raises ValueError, and closes the pool, if the class cannot be used, is not loaded within
        `load_seconds` from now, or requires a column that some row lacks.
        """
        patience = load_seconds(self.cfg.timeout)
        try:
            wanted = result_within(self._loaded, patience)
        except (InstanceFailed, InstancesLost) as error:
            self.close()
            raise ValueError(f"{self._what} cannot be loaded: {error}") from None
        except TimeoutError:
            self.close()
            raise ValueError(f"{self._what} not loaded after {patience:g} s") from None
        for name in wanted:
            if text := missing_column(name, rows):
                self.close()
                raise ValueError(f"reset of {self._what} requires {name!r}: {text}")

    def new_instance(self) -> "Instance":
        return Instance(self, next(self._keys))

    def call(self, action: str, key: int, *what: Any) -> Future[Any]:
        """Send the worker a call; the future may raise InstanceFailed or InstancesLost."""
        future = lasting_future()
        # Entered before the send: the reader thread may see the answer before `send` returns.
        with self._lock:
            if self._failure:
                future.set_exception(InstancesLost(self._failure))
                return future
            assert key not in self._calls, "a call of this instance is open"
            self._calls[key] = future
        self.send(action, key, *what)
        return future

    def send(self, *message: Any) -> None:
        """Send the worker a message; raises InstancesLost if it does not read. A dead worker raises
        nothing here: the reader thread fails all pending calls."""
        try:
            self._worker.connection.send(message)
        except BlockingIOError:
            raise InstancesLost(
                f"the worker of the environments read nothing for {SEND_SECONDS} s"
            ) from None
        except ConnectionError:
            pass

    def close(self) -> None:
        """Kill the worker and all instances; none of their processes is left on return."""
        self._worker.begin_kill()
        self._worker.finish_kill()
        self._reader.join()
        self._worker.connection.close()

    def _read(self) -> None:
        """Set the future of every answered call, until the worker ends; the reader thread."""
        try:
            while True:
                key, is_good, result = self._worker.receive_json()
                with self._lock:
                    future = self._calls.pop(key)
                if is_good:
                    future.set_result(result)
                else:
                    future.set_exception(InstanceFailed(result))
        except (EOFError, ConnectionError):
            cause = self._worker.cause_of_death(DEATH_SECONDS)
            self._fail_all(f"the worker of the environments: {cause}")
        except Exception as error:  # an unexpected answer: fail all pending calls
            self._fail_all(f"the worker of the environments: its answers are invalid: {error!r}")

    def _fail_all(self, cause: str) -> None:
        with self._lock:
            self._failure = cause
            waiting, self._calls = [*self._calls.values()], {}
        for future in waiting:
            future.set_exception(InstancesLost(cause))


@dataclass(frozen=True)
class Instance:
    """Handle of the environment or the agent of one sample."""

    pool: ForkPool
    key: int

    def begin(self, prompt: str, columns: Mapping[str, Any], seed: int) -> Future[Any]:
        """Call `reset` of an environment, for its first observation or None, or `run_episode` of an
        agent, for its outcome (`actors.checked`). `seed` is for the process's random generators."""
        return self.pool.call("begin", self.key, seed, prompt, dict(columns))

    def step(self, text: str, **turn: Any) -> "Future[list[Any]]":
        """Call `step` of an environment, for the fields of a `Step`; `turn` are the optional
        arguments `fork_server.TURN`."""
        return self.pool.call("step", self.key, text, turn)

    def end(self) -> None:
        self.pool.send("end", self.key)
