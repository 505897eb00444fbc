"""Watches an engine while a run uses it: its tokens, how many completions run, the ranks' core."""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import httpx
import numpy as np
import psutil

from megatron_grpo.launch.run_dir import bearer

INTERVAL = 0.25
"""Seconds between two looks; a look takes the engine some milliseconds."""
RUNNING = re.compile(r"^vllm:num_requests_running(?:{.*})? (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)
PROMPTS = re.compile(r"^vllm:prompt_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Look:
    """What an engine's metrics say at a time."""

    at: float
    """`time.time()`"""
    running: float
    generated: float
    """Tokens since its start."""
    prompts: float
    """Tokens of prompts since its start."""
    computed: float
    """Seconds that the ranks' core has computed since the machine's start."""


class Watch:
    """Looks at an engine, and at the core of the ranks, while the block runs."""

    def __init__(self, url: str, token: str, core: int) -> None:
        self.looks: list[Look] = []
        self._core = core
        self._http = httpx.Client(base_url=url, headers=bearer(token), trust_env=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._http.close()

    def between(self, start: float, end: float) -> list[Look]:
        """The looks from one time to another."""
        return [each for each in self.looks if start <= each.at <= end]

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            page = self._http.get("/metrics", timeout=10).text
            values = (float(each.findall(page)[0]) for each in (RUNNING, GENERATED, PROMPTS))
            core = psutil.cpu_times(percpu=True)[self._core]
            self.looks.append(Look(time.time(), *values, core.user + core.system))


def children_seconds() -> float:
    """Seconds that the processes which this one has started have computed: those of its engine."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(each.cpu_times()[:2]) for each in children)


def idle_share(looks: Sequence[Look]) -> float:
    """Share of the time in which nothing ran."""
    return sum(not each.running for each in looks) / len(looks)


def pass_seconds(looks: Sequence[Look]) -> Callable[[int], float]:
    """Seconds of a forward pass by the number of running completions: constant + slope * number.

    Between two looks with n completions, a pass generated n tokens. The seconds between looks are
    fitted, so that their sum is about right, and a pause of the engine weighs no more than it took.
    Prompts count as idle time: completions count as running from the end of their first pass on.
    """
    rows, seconds = [], []
    for before, after in pairwise(looks):
        tokens = after.generated - before.generated
        if before.running and after.running and tokens > 0:
            rows.append([2 * tokens / (before.running + after.running), tokens])
            seconds.append(after.at - before.at)
    (constant, slope), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds))
    return lambda running: float(constant + slope * running)
