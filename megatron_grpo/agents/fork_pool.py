"""The trainer's side of environments and agents: any number at once, a future for each call."""

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
"""Key of the answer about loading the class, in place of an instance's key."""
DEATH_SECONDS = 30.0
"""Time for the worker to die after its connection has closed, with a process for each sample."""
SEND_SECONDS = 10
"""The worker reads continuously: if a send takes longer than this, it is broken."""


class InstanceFailed(Exception):
    """A call failed or was late; the text says how. Only that sample has failed."""


class InstancesLost(RuntimeError):
    """The process that instances are forked from is gone, and all instances with it."""


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn of the model."""

    observation: str
    reward: float
    done: bool


class ForkPool:
    """A worker that forks one process for each sample: an environment, or an agent. It loads the
    class in the background, until `close`. Messages name the keys of `section`, and `what` is
    loaded."""

    def __init__(
        self, cfg: EnvironmentConfig, section: str = "environment", what: str = ""
    ) -> None:
        self.cfg = cfg
        self._what = what or f"environment {cfg.name}"
        self._keys = count()
        self._lock = threading.Lock()
        """Guards calls and failure, which the reader's thread changes; only one thread sends."""
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
        with self._lock:
            if self._failure:
                future.set_exception(InstancesLost(self._failure))
                return future
            assert key not in self._calls, "a call of this instance is open"
            self._calls[key] = future
        self.send(action, key, *what)
        return future

    def send(self, *message: Any) -> None:
        """Send the worker a message; raises InstancesLost if it does not read. If the worker is
        dead, this raises nothing: the futures of pending calls do."""
        try:
            self._worker.connection.send(message)
        except BlockingIOError:
            raise InstancesLost(
                f"the worker of the environments: it read nothing for {SEND_SECONDS} s"
            ) from None
        except ConnectionError:
            pass

    def close(self) -> None:
        """Kill the worker and all environments; no process of them is left when this returns."""
        self._worker.begin_kill()
        self._worker.finish_kill()
        self._reader.join()
        self._worker.connection.close()

    def _read(self) -> None:
        """Set the future of every answered call, until the worker ends."""
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
    """The environment or the agent of one sample."""

    pool: ForkPool
    key: int

    def begin(self, prompt: str, columns: Mapping[str, Any], seed: int) -> Future[Any]:
        """Call `reset` of an environment: its first observation, or None; or `run_episode` of an
        agent: the end of its episode (`actors.checked`). `seed` seeds the random generators of its
        process."""
        return self.pool.call("begin", self.key, seed, prompt, dict(columns))

    def step(self, text: str, **turn: Any) -> "Future[list[Any]]":
        """Answer a turn of the model with the fields of a `Step`; `turn` has values for
        `fork_server.TURN`."""
        return self.pool.call("step", self.key, text, turn)

    def end(self) -> None:
        self.pool.send("end", self.key)
