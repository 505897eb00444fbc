"""The rollout engines of a run as rank 0 sees them: serving, lost, or coming back."""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto

from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.http import HEALTH_TIMEOUT, RolloutAborted, is_healthy
from megatron_grpo.engines.joining import JoinFolder
from megatron_grpo.engines.server import EngineServers
from parallel.clock import running_time

MAX_COMEBACKS = 3
"""Restarts of an engine that completes no generation in between, before it is given up."""


class State(Enum):
    """State of one engine."""

    SERVING = auto()
    """Healthy, with the current weights from a verified push."""
    STALE = auto()
    """Healthy, waiting for a push."""
    DOWN = auto()
    """Dead, hung or failed, and has not answered again yet."""
    GIVEN_UP = auto()
    """Lost too often."""


@dataclass
class EngineRecord:
    """One engine of the pool."""

    url: str
    state: State = State.STALE
    reason: str = "has not received weights yet"
    """Reason why it does not serve, if it does not."""
    is_missed: bool = False
    """Whether it was lost or left out since it last served."""
    num_recent_losses: int = 0
    """Losses since it last completed a generation."""
    num_losses: int = 0
    """Losses in all."""
    since: float = field(default_factory=running_time)
    """Time of its last start or loss."""
    file_changed: int = 0
    """Time of the last change of a joined engine's file; see `JoinFolder.joined`."""
    unanswered: int = 0
    """`file_changed` when it was last asked in vain whether it answers."""

    @property
    def is_silent(self) -> bool:
        """Whether it has joined, does not answer, and has not touched its file since."""
        return self.state is State.DOWN and 0 < self.file_changed == self.unanswered


class EnginePool:
    """The engines, each in one of four states, and the transitions between these.

    With a folder `joining`, others may join.

    Only a successful push makes an engine serve. A lost engine that the run started itself is
    killed and started again; one of `rollout.base_urls`, or one that has joined, is waited for.
    Either way it takes no part until it answers and the next push has reached it.
    """

    def __init__(
        self, servers: EngineServers, rollout: RolloutConfig, joining: JoinFolder | None = None
    ) -> None:
        self.token = servers.token
        self._joining = joining
        self._servers = servers
        self._startup_timeout = rollout.startup_timeout
        self._health_timeout = rollout.health_timeout
        self._records = {url: EngineRecord(url) for url in servers.base_urls}

    @property
    def serving(self) -> list[str]:
        """Addresses of the engines that serve the current weights."""
        return self._urls_in(State.SERVING)

    @property
    def up(self) -> list[tuple[str, int]]:
        """Address of each healthy engine, and how often it was lost."""
        return [self.life(url) for url in self._urls_in(State.SERVING, State.STALE)]

    @property
    def starting(self) -> list[tuple[str, int]]:
        """Address and number of losses of each engine that may be starting again."""
        down = map(self._records.__getitem__, self._urls_in(State.DOWN))
        return [self.life(record.url) for record in down if not self._is_late(record)]

    def life(self, url: str) -> tuple[str, int]:
        """Address of an engine, and how often it was lost."""
        return url, self._records[url].num_losses

    def has_joined(self, url: str) -> bool:
        """Whether an engine is none of those that the run began with."""
        return url not in self._servers.base_urls

    @property
    def has_leavers(self) -> bool:
        """Whether an engine is to leave at the next push."""
        return self._joining is not None and bool(self._joining.leavers())

    def join_and_leave(self) -> None:
        """Take in the engines that have joined, and drop those that leave, which have no requests.

        One that has joined is down until it answers, as `check_engines` finds out. One that does
        not is asked again when its file has changed: it may have been killed and left its file.
        """
        if self._joining is None:
            return
        leavers, joined = self._joining.leavers(), self._joining.joined()
        for url, file_changed in joined.items():
            if url not in self._records:
                self._records[url] = EngineRecord(url, State.DOWN, "has not answered yet")
                _log(f"rollout engine {url} joins")
            if self.has_joined(url):
                self._records[url].file_changed = file_changed
        for url in self._records.keys() - {*self._servers.base_urls, *joined}:
            del self._records[url]
            _log(f"rollout engine {url} has left")
        for file in leavers:  # only now may the engine end
            file.unlink(missing_ok=True)

    def check_engines(self) -> list[str]:
        """Lose engines that have died or hang; returns those that answer again."""
        able = self._urls_in(State.SERVING, State.STALE, State.DOWN)
        asked = [url for url in able if not self._records[url].is_silent]
        with ThreadPoolExecutor(len(asked) or 1) as pool:
            answers = dict(zip(asked, pool.map(self._answers, asked), strict=True))
        came_back = []
        for record in map(self._records.__getitem__, asked):
            if end := self._servers.end(record.url):
                self.mark_dead(record.url, end)
            elif record.state is State.DOWN:
                if answers[record.url]:
                    came_back.append(record.url)
                elif self._servers.are_ours and self._is_late(record):
                    self.mark_dead(
                        record.url,
                        f"did not answer within {self._startup_timeout:g} s of its start "
                        "(rollout.startup_timeout)",
                    )
                elif record.file_changed:
                    record.unanswered = record.file_changed
                    _log(
                        f"rollout engine {record.url} does not answer: it is asked again when its "
                        "file in engines/ has changed"
                    )
            elif not answers[record.url]:
                self.mark_dead(
                    record.url,
                    f"did not answer within {self._health_timeout:g} s (rollout.health_timeout)",
                )
        return came_back

    def mark_dead(self, url: str, reason: str) -> None:
        """Take out an engine that is dead, hangs or is broken, and restart it if it is ours.

        Call this from one thread at a time.
        """
        record = self._records[url]
        end = self._servers.kill(url) if self._servers.are_ours else ""
        reason = (end or reason).removeprefix(f"rollout engine {url} ")
        record.reason = reason + self._servers.log_tail(url)
        record.num_recent_losses += 1
        record.num_losses += 1
        record.is_missed = True
        record.since = running_time()
        if record.num_recent_losses > MAX_COMEBACKS:
            record.state = State.GIVEN_UP
            then = f"it came back {MAX_COMEBACKS} times and is given up"
        elif self._servers.are_ours:
            self._servers.restart(url)
            record.state, then = State.DOWN, "it is being restarted"
        else:
            record.state, then = State.DOWN, "it is used again once it answers and has new weights"
        _log(f"rollout engine {url} is lost: {reason}; {then}")

    def mark_stale(self, url: str, reason: str) -> None:
        """Let a healthy engine wait for the next push."""
        record = self._records[url]
        record.state, record.is_missed = State.STALE, True
        record.reason = reason.removeprefix(f"rollout engine {url} ")
        _log(f"rollout engine {url} is out until the next push: {record.reason}")

    def mark_recovered(self, url: str) -> None:
        """Let an engine that answers again wait for the next push."""
        self._records[url].state = State.STALE

    def lose_weights(self, urls: Iterable[str]) -> None:
        """Record that a push to these engines has begun, or that they sleep: they cannot serve."""
        for url in urls:
            self._records[url].state = State.STALE
            self._records[url].reason = "has not completed the last push of weights"

    def finish_push(self, urls: Iterable[str]) -> None:
        """Record that these engines hold the current weights and serve."""
        for url in urls:
            record = self._records[url]
            record.state = State.SERVING
            if record.is_missed:
                record.is_missed = False
                _log(f"rollout engine {url} is back")

    def finish_generation(self) -> None:
        """Reset the loss counts of the engines that served a whole generation."""
        for url in self.serving:
            self._records[url].num_recent_losses = 0

    def raise_if_all_dead(self, deadline: float) -> None:
        """Raise RolloutAborted if no engine can come back, or after `deadline` (`running_time`)."""
        if running_time() > deadline or not self._urls_in(State.STALE, State.DOWN):
            raise RolloutAborted(f"no rollout engine serves any more:\n{self.status_report()}")

    def status_report(self) -> str:
        """One line for each engine that does not serve, with the reason."""
        out = [record for record in self._records.values() if record.state is not State.SERVING]
        return "\n".join(f"rollout engine {record.url} {record.reason}" for record in out)

    def _urls_in(self, *states: State) -> list[str]:
        return [record.url for record in self._records.values() if record.state in states]

    def _answers(self, url: str) -> bool:
        is_down = self._records[url].state is State.DOWN
        return is_healthy(url, HEALTH_TIMEOUT if is_down else self._health_timeout)

    def _is_late(self, record: EngineRecord) -> bool:
        return running_time() - record.since > self._startup_timeout


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
