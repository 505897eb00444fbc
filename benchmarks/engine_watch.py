"""Watches an engine during a run: its tokens, its running completions, and the ranks' core."""

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
"""Seconds between two looks; a look costs the engine some milliseconds."""
RUNNING = re.compile(r"^vllm:num_requests_running(?:{.*})? (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)
PROMPTS = re.compile(r"^vllm:prompt_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Look:
    """Metrics of an engine at one time."""

    at: float
    """`time.time()`"""
    running: float
    generated: float
    """Generated tokens since the engine's start."""
    prompts: float
    """Prompt tokens since the engine's start."""
    computed: float
    """Busy seconds of the ranks' core since the machine's start."""


class Watch:
    """Looks at an engine and at the ranks' core during the block."""

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
        """Looks between two times."""
        return [each for each in self.looks if start <= each.at <= end]

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            page = self._http.get("/metrics", timeout=10).text
            values = (float(each.findall(page)[0]) for each in (RUNNING, GENERATED, PROMPTS))
            core = psutil.cpu_times(percpu=True)[self._core]
            self.looks.append(Look(time.time(), *values, core.user + core.system))


def children_seconds() -> float:
    """CPU seconds of this process's descendants, which are those of its engine."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(each.cpu_times()[:2]) for each in children)


def idle_share(looks: Sequence[Look]) -> float:
    """Share of the looks without running completions."""
    return sum(not each.running for each in looks) / len(looks)


def pass_seconds(looks: Sequence[Look]) -> Callable[[int], float]:
    """Seconds of a forward pass by the number of running completions: constant + slope * number.

    Between two looks with n completions, a pass generated n tokens. Seconds between looks are
    fitted, so that their sum is about right, and a pause of the engine weighs only its own seconds.
    Prompts count as idle time: a completion counts as running from the end of its first pass on.
    """
    rows, seconds = [], []
    for before, after in pairwise(looks):
        tokens = after.generated - before.generated
        if before.running and after.running and tokens > 0:
            rows.append([2 * tokens / (before.running + after.running), tokens])
            seconds.append(after.at - before.at)
    (constant, slope), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds))
    return lambda running: float(constant + slope * running)
