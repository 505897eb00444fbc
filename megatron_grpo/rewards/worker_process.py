"""A reward worker as the trainer sees it: a process, its connection and its calls in progress."""

import json
import subprocess
import time
from contextlib import suppress
from typing import Any

from megatron_grpo.config.reward_config import RewardConfig
from megatron_grpo.rewards.answer import Answer
from megatron_grpo.user_code.failure_text import death_text
from megatron_grpo.user_code.supervised import (
    load_seconds,
    start_supervised,
    tell_to_end,
    wait_end,
)

WORKER_MODULE = "megatron_grpo.rewards.worker"
DEATH_SECONDS = 2.0
"""Seconds to wait for a worker's death after its connection has closed."""


class WorkerProcess:
    """One process that runs the config's reward functions; it starts loading them at once."""

    def __init__(self, cfg: RewardConfig) -> None:
        self.cfg = cfg
        self.is_loading = True
        self.load_seconds = load_seconds(cfg.timeout)
        self.load_deadline = time.monotonic() + self.load_seconds
        self.deadlines: dict[int, float] = {}
        """The deadline of each call in progress, by number."""
        self.is_spent = False
        """Whether it takes no more calls, and is replaced once it has answered those it has."""
        self.fate = ""
        """Why it has failed; empty while it works."""
        self._supervisor, self.connection = start_supervised(
            WORKER_MODULE, cfg.memory_megabytes, cfg.timeout
        )
        self.connection.send((cfg.functions, cfg.timeout))

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which ends with the worker and all its descendants."""
        return self._supervisor.pid

    @property
    def next_deadline(self) -> float:
        """When the next answer is late; only valid while loading or running calls."""
        return self.load_deadline if self.is_loading else min(self.deadlines.values())

    def send(self, number: int, call: tuple[Any, ...], seconds: float) -> None:
        """Send it call `number`, to be answered within `seconds`."""
        self.deadlines[number] = time.monotonic() + seconds
        try:
            self.connection.send((number, *call))
        except ConnectionError:
            self.fate = self._cause_of_death()
        except BlockingIOError:
            self.fate = f"its process did not read the call in {self.cfg.timeout} s: killed"

    def receive_functions(self) -> list[tuple[list[str], list[str] | None, bool]] | str:
        """Required and accepted columns and asynchrony of each function, or why none is loaded."""
        self.is_loading = False
        message = self._receive()
        return self.fate if message is None else message

    def receive_answer(self) -> tuple[int, Answer] | None:
        """The number of a call and its answer; None if the worker has died (see `fate`)."""
        message = self._receive()
        if message is None:
            return None
        number, fields = message
        answer = Answer(**fields)
        del self.deadlines[number]
        self.is_spent |= answer.is_spent
        return number, answer

    def tell_to_end(self) -> None:
        """Tell it to end, with all that it has started."""
        tell_to_end(self._supervisor)

    def wait_end(self) -> None:
        """After `tell_to_end`, return when none of its processes is left."""
        wait_end(self._supervisor)
        self.connection.close()

    def _receive(self) -> Any:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.fate = self._cause_of_death()
            return None

    def _cause_of_death(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # it may live on without the connection
            self._supervisor.wait(DEATH_SECONDS)
        limit = f"reward.memory_megabytes {self.cfg.memory_megabytes}"
        return death_text(self._supervisor.returncode, limit)
