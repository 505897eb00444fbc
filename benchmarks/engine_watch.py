"""Watches what an engine does while a run uses it: its tokens, and how many completions run."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import httpx
import numpy as np

from megatron_grpo.launch.run_dir import bearer

INTERVAL = 0.25
"""Seconds between two looks; a look takes the engine some milliseconds."""
RUNNING = re.compile(r"^vllm:num_requests_running(?:{.*})? (\S+)$", re.MULTILINE)
GENERATED = re.compile(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Look:
    """What an engine's metrics say at a time."""

    at: float
    """`time.time()`"""
    running: float
    generated: float
    """Tokens since its start."""


class Watch:
    """Looks at an engine while the block runs."""

    def __init__(self, url: str, token: str) -> None:
        self.looks: list[Look] = []
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
            values = (float(each.findall(page)[0]) for each in (RUNNING, GENERATED))
            self.looks.append(Look(time.time(), *values))


def idle_share(looks: Sequence[Look]) -> float:
    """Share of the time in which nothing ran."""
    return sum(not each.running for each in looks) / len(looks)


def pass_seconds(looks: Sequence[Look]) -> Callable[[int], float]:
    """Seconds of a forward pass by the number of running completions: a line through those seen.

    Between two looks with n completions, each got (tokens generated) / n tokens.
    """
    seconds, tokens = defaultdict[int, float](float), defaultdict[int, float](float)
    for before, after in pairwise(looks):
        running = round((before.running + after.running) / 2)
        if min(before.running, after.running) and after.generated > before.generated:
            seconds[running] += after.at - before.at
            tokens[running] += after.generated - before.generated
    each = np.array([seconds[n] * n / tokens[n] for n in seconds])
    weights = np.sqrt([seconds[n] for n in seconds])
    slope, constant = np.polyfit([*seconds], each, 1, w=weights)
    return lambda running: float(constant + slope * running)
