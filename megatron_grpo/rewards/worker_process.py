"""A reward worker as the trainer sees it: a process with a connection, and calls that it runs."""

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
"""How long after a worker's last word its death is waited for."""


class WorkerProcess:
    """One process that runs the config's reward functions; it begins to load them at once."""

    def __init__(self, cfg: RewardConfig) -> None:
        self.cfg = cfg
        self.is_loading = True
        self.load_seconds = load_seconds(cfg.timeout)
        self.load_deadline = time.monotonic() + self.load_seconds
        self.deadlines: dict[int, float] = {}
        """By number the calls that it runs, and when each must have been answered."""
        self.is_spent = False
        """It takes no more calls, and is to be replaced when it has answered those it has."""
        self.fate = ""
        """Why it can do nothing any more; empty while it can."""
        self._supervisor, self.connection = start_supervised(
            WORKER_MODULE, cfg.memory_megabytes, cfg.timeout
        )
        self.connection.send((cfg.functions, cfg.timeout))

    @property
    def pid(self) -> int:
        """Process id of what ends as the worker ends, and with it all that the worker started."""
        return self._supervisor.pid

    @property
    def next_deadline(self) -> float:
        """When an answer is late; it must load or run something."""
        return self.load_deadline if self.is_loading else min(self.deadlines.values())

    def send(self, number: int, call: tuple[Any, ...], seconds: float) -> None:
        """Have it run call `number`, to be answered in `seconds`."""
        self.deadlines[number] = time.monotonic() + seconds
        try:
            self.connection.send((number, *call))
        except ConnectionError:
            self.fate = self._cause_of_death()
        except BlockingIOError:
            self.fate = f"its process did not read the call in {self.cfg.timeout} s: killed"

    def receive_functions(self) -> list[tuple[list[str], bool]] | str:
        """What it says of its functions when they are loaded, or why they are not."""
        self.is_loading = False
        message = self._receive()
        return self.fate if message is None else message

    def receive_answer(self) -> tuple[int, Answer] | None:
        """The answer to a call, by its number; None when it has met its fate instead."""
        message = self._receive()
        if message is None:
            return None
        number, fields = message
        answer = Answer(**fields)
        del self.deadlines[number]
        self.is_spent |= answer.is_spent
        return number, answer

    def tell_to_end(self) -> None:
        """Have it end, with all that it has started."""
        tell_to_end(self._supervisor)

    def wait_end(self) -> None:
        """Return when nothing of it is left, after `tell_to_end`."""
        wait_end(self._supervisor)
        self.connection.close()

    def _receive(self) -> Any:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.fate = self._cause_of_death()
            return None

    def _cause_of_death(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # it may live, without the connection
            self._supervisor.wait(DEATH_SECONDS)
        limit = f"reward.memory_megabytes {self.cfg.memory_megabytes}"
        return death_text(self._supervisor.returncode, limit)
