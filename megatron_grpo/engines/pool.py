"""The rollout engines of a run as rank 0 sees them: serving, lost, coming back, or joining."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.http import HEALTH_TIMEOUT, RolloutAborted, is_healthy
from megatron_grpo.engines.joining import (
    FOLDER,
    JOINED,
    LEAVING,
    JoinedEngine,
    refusal,
    settings_of,
)
from megatron_grpo.engines.server import EngineServers
from parallel.clock import running_time

MAX_COMEBACKS = 3
"""Times an engine may come back without a completed generation in between; then it is given up."""


class State(Enum):
    """State of one engine."""

    SERVING = auto()
    """Healthy, with the current weights of a verified push."""
    STALE = auto()
    """Healthy, waiting for a push."""
    DOWN = auto()
    """Dead, hung or failed; it has not answered again."""
    GIVEN_UP = auto()
    """Lost too often."""


@dataclass(eq=False)
class EngineRecord:
    """One engine of the pool."""

    url: str
    state: State = State.STALE
    reason: str = "has not received weights yet"
    """Why it does not serve; of no meaning while it serves."""
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
    """`file_changed` at its last health check without an answer."""


class JoinFolder:
    """The files of joined engines, which rank 0 reads before each push.

    `refusal` says why no engine can join; empty if engines can. If all `base_urls` are loopback
    addresses, the ranks listen on loopback alone, and engines of other hosts are refused.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], base_urls: Sequence[str], refusal: str
    ) -> None:
        self.folder, self._settings, self._refusal = folder, settings, refusal
        self._is_local = all(map(_is_loopback, base_urls))
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def of_run(cls, cfg: Config) -> "JoinFolder":
        urls, reason = cfg.rollout.base_urls, refusal(cfg)
        if not urls:
            reason = reason or (
                "the run starts its engines itself, with a token that no other has: start them by "
                "`megatron-grpo serve` and give rollout.base_urls, as the jobs in slurm/ do"
            )
        settings = settings_of(cfg.model, cfg.rollout, cfg.lora)
        return cls(cfg.train.run_dir / FOLDER, settings, urls, reason)

    def joined(self) -> dict[str, int]:
        """Addresses of accepted engines, with the change times of their files in nanoseconds; each
        refusal is printed once."""
        return dict(filter(None, map(self._read, sorted(self.folder.glob(f"*{JOINED}")))))

    def _read(self, file: Path) -> tuple[str, int] | None:
        """Address and change time of the engine of `file`; None if it is refused, or has left."""
        try:
            changed = file.stat().st_mtime_ns
            engine = msgspec.json.decode(file.read_bytes(), type=JoinedEngine)
        except FileNotFoundError:  # it has left since
            return None
        except (OSError, msgspec.MsgspecError) as error:
            fault = f"the file cannot be read: {error}"
        else:
            fault = self._fault(engine)
            if not fault:
                return engine.url, changed
        if (file.name, fault) not in self._reported:
            self._reported.add((file.name, fault))
            print(f"the engine of {file} cannot join: {fault}", file=sys.stderr, flush=True)
        return None

    def _fault(self, engine: JoinedEngine) -> str:
        if self._refusal:
            return self._refusal
        parts = urlsplit(engine.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return f"{engine.url!r} is not an address like http://host:8000"
        if self._is_local and not _is_loopback(engine.url):
            return (
                f"{engine.url} is on another network than rollout.base_urls, for which the ranks "
                "listen on loopback alone: give these the address of their host, too"
            )
        for name, ours in self._settings.items():
            if (theirs := engine.settings.get(name)) != ours:
                return f"its {name} is {theirs}, the run's {ours}: start it with the run's config"
        return ""


class EnginePool:
    """The engines, each in one of four states, and the transitions between states.

    Only a successful push makes an engine serve. A lost engine that the run started itself is
    restarted; a lost engine of `rollout.base_urls`, or one that joined, is waited for. Both take
    no part until they answer and the next push has reached them.

    The number of losses identifies an engine's life: it differs after a restart.
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
    def serving(self) -> dict[str, int]:
        """Engines that serve the current weights: number of losses by address."""
        return {each.url: each.num_losses for each in self._in(State.SERVING)}

    @property
    def up(self) -> dict[str, int]:
        """Healthy engines: number of losses by address."""
        return {each.url: each.num_losses for each in self._in(State.SERVING, State.STALE)}

    @property
    def starting(self) -> dict[str, int]:
        """Lost engines that may be starting again: number of losses by address."""
        down = self._in(State.DOWN)
        return {each.url: each.num_losses for each in down if not self._is_late(each)}

    def has_joined(self, url: str) -> bool:
        """Whether an engine came after the run began."""
        return url not in self._servers.base_urls

    @property
    def has_leavers(self) -> bool:
        """Whether an engine is to leave at the next push."""
        return self._joining is not None and any(self._joining.folder.glob(f"*{LEAVING}"))

    def join_and_leave(self) -> None:
        """Add engines that have joined, down until they answer, and drop engines that leave; the
        router has aborted their requests."""
        if self._joining is None:
            return
        # Before `joined`: a file renamed between the two reads is removed at the next push only.
        # Removed now, its engine would end while it is still in `joined`.
        leavers = [*self._joining.folder.glob(f"*{LEAVING}")]
        joined = self._joining.joined()
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

    def check_engines(self) -> dict[str, int]:
        """Mark engines that died or hang as lost; returns those that answer again, as in `up`."""
        able, down = self._in(State.SERVING, State.STALE, State.DOWN), self._in(State.DOWN)
        # A silent engine that joined is checked again only when it has touched its file: of a host
        # that is gone, each health check would take HEALTH_TIMEOUT.
        silent = [each for each in down if 0 < each.file_changed == each.unanswered]
        checked = [each for each in able if each not in silent]
        limits = [HEALTH_TIMEOUT if each in down else self._health_timeout for each in checked]
        # In parallel, as every silent engine takes its whole timeout.
        with ThreadPoolExecutor(len(checked) or 1) as pool:
            answers = [*pool.map(is_healthy, [each.url for each in checked], limits)]
        came_back = {}
        for record, has_answered in zip(checked, answers, strict=True):
            if has_answered:
                if record.state is State.DOWN:
                    came_back[record.url] = record.num_losses
            elif end := self._servers.end(record.url):
                self.mark_dead(record.url, end)
            elif record.state is not State.DOWN:
                self.mark_dead(
                    record.url,
                    f"did not answer within {self._health_timeout:g} s (rollout.health_timeout)",
                )
            elif self._servers.are_ours and self._is_late(record):
                self.mark_dead(
                    record.url,
                    f"did not answer within {self._startup_timeout:g} s of its start "
                    "(rollout.startup_timeout)",
                )
            elif record.file_changed:
                record.unanswered = record.file_changed
                _log(
                    f"rollout engine {record.url} does not answer: it is checked again when its "
                    "file in engines/ has changed"
                )
        return came_back

    def mark_dead(self, url: str, reason: str) -> None:
        """Take out an engine that is dead, hangs or is broken, and restart it if it is ours. One
        thread at a time may call this."""
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
        """Record that these engines cannot serve: a push has begun, or they sleep."""
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
        for record in self._in(State.SERVING):
            record.num_recent_losses = 0

    def raise_if_all_dead(self, deadline: float) -> None:
        """Raise RolloutAborted if no engine can come back, or after `deadline` (`running_time`)."""
        if running_time() > deadline or not self._in(State.STALE, State.DOWN):
            raise RolloutAborted(f"no rollout engine serves any more:\n{self.status_report()}")

    def status_report(self) -> str:
        """One line for each engine that does not serve, with the reason."""
        out = [record for record in self._records.values() if record.state is not State.SERVING]
        return "\n".join(f"rollout engine {record.url} {record.reason}" for record in out)

    def _in(self, *states: State) -> list[EngineRecord]:
        return [record for record in self._records.values() if record.state in states]

    def _is_late(self, record: EngineRecord) -> bool:
        return running_time() - record.since > self._startup_timeout


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
