"""What rank 0 knows about all ranks, and its decision whether the job must end, and why.

Nothing here waits or reads a clock: every event comes with the time at which it was noticed. Each
phase of a step has a limit of its own for the time without progress. When it is over, the stacks of
all main threads are compared, and ranks that wait elsewhere than most are named.
"""

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_grpo.config.config import Config
from megatron_grpo.timing import WAIT
from parallel.weight_transfer import TIMEOUT

MARGIN_SECONDS = 15.0
"""Added to the limits of waits with their own timeout, so that these fail first."""

START = "start"
"""The phase before the first step, while engines start. Reading weights is another one: `load`."""


@dataclass(frozen=True)
class Limit:
    """A limit in seconds, and the config key that sets it."""

    seconds: float
    key: str


@dataclass(frozen=True)
class Limits:
    """The longest times without progress on any rank, by phase of rank 0."""

    start: Limit
    step: Limit
    push: Limit

    @classmethod
    def of(cls, cfg: Config) -> "Limits":
        """The limits of a run."""
        rollout = cfg.rollout
        # A link without traffic for TIMEOUT is given up; then its engine is waited for until it
        # counts as lost, and the push is repeated.
        waits = TIMEOUT.total_seconds() + rollout.stall_timeout
        push = Limit(waits + MARGIN_SECONDS, "rollout.stall_timeout")
        step = Limit(cfg.train.hang_timeout, "train.hang_timeout")
        return cls(
            start=Limit(rollout.startup_timeout + MARGIN_SECONDS, "rollout.startup_timeout"),
            step=step,
            push=max(push, step, key=_seconds),
        )

    def of_phase(self, phase: str, *, is_first_step: bool) -> Limit | None:
        """The limit while rank 0 is in `phase`; None if it may take any time.

        Files may be slow, an engine that generates nothing or does not start counts as lost, and
        every call of a reward or an environment has its own limit. The first step of a process gets
        more time, for compiling kernels and making connections.
        """
        match phase.removeprefix(f"{WAIT}_"):
            case "await_engines":
                return self.start
            case "load" | "generate" | "eval_generate" | "score" | "eval_score":
                return None
            case "log" | "eval_log" | "save" | "close" | "sleep":
                return None
            case "push" | "verify_weights":
                usual = self.push
            case _:
                usual = self.step
        return max(self.start, usual, key=_seconds) if is_first_step else usual


def _seconds(limit: Limit) -> float:
    return limit.seconds


FRAME = re.compile(r'File "(.*)", line \d+, in (.*)')
WAITS = re.compile(r"/torch/(distributed|cuda)/|/pipeline_parallel/p2p_communication\.py")
"""Where a rank waits for others: in torch.distributed, in Megatron-Core's own waits for pipeline
sends and receives, or, with NCCL, where the host next synchronizes with the device."""


def main_stack() -> str:
    """The stack of this process's main thread, innermost call last as in a traceback."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()


def stragglers(stacks: Mapping[int, str], progress: Mapping[int, tuple[int, int]]) -> list[int]:
    """The ranks that the others wait for, as far as stacks and progress show; else none.

    `progress` increases as a rank advances. If most ranks wait for others in a collective, the ones
    that do not are the cause. Otherwise it is those that lag behind, or else those that are at a
    different place than most.
    """
    busy = [rank for rank, stack in stacks.items() if not WAITS.search(stack)]
    if busy and 2 * len(busy) <= len(stacks):
        return busy
    last = min(progress.values())
    behind = [rank for rank in stacks if progress[rank] == last]
    if 2 * len(behind) <= len(stacks):
        return behind
    places = {rank: tuple(FRAME.findall(stack)) for rank, stack in stacks.items()}
    [(common, count)] = Counter(places.values()).most_common(1)
    if 2 * count > len(stacks):
        return [rank for rank, place in places.items() if place != common]
    return []


EXIT_FAILURE = 1
EXIT_FOR_THE_USER = 2
NUM_RANKS_SHOWN = 3


@dataclass(frozen=True)
class Pace:
    """Intervals and time limits of the watch, in seconds."""

    beat: float = 1.0
    """Between two heartbeats of a rank, and of the monitor."""
    silence: float = 20.0
    """Without a heartbeat, until a rank counts as stopped."""
    kill: float = 30.0
    """Without a heartbeat of its own, until the kernel kills the process."""
    settle: float = 0.5
    """From the first sign of trouble to the verdict: effects may show before the cause."""
    stacks: float = 2.0
    """In which ranks must report their stacks."""
    unwind: float = 5.0
    """In which rank 0 may close what it owns before it exits."""


PACE = Pace()


@dataclass(frozen=True)
class Position:
    """Progress of the main thread of a rank."""

    step: int = 0
    """Current optimizer step, counted from 1; 0 before the first."""
    phase: str = START
    num_phases: int = 0
    num_ticks: int = 0

    def __str__(self) -> str:
        phase = [f"phase {self.phase}"] if self.phase else []
        return " of ".join([*phase, f"step {self.step}"] if self.step else phase)


@dataclass
class Member:
    """A rank that has connected to the monitor."""

    rank: int
    host: str
    pid: int
    heard: float
    """Time of its last heartbeat."""
    position: Position = Position()
    stack: str | None = None
    """Stack of its main thread, once it has answered the last request for it."""
    dump: list[str] = field(default_factory=list)
    """What Python's faulthandler wrote at a crash, or because the watch thread could not run."""
    has_told: bool = False
    """Whether it has reported that it leaves or why it failed: then its end is expected."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Failure:
    """A rank's report of the exception that ended its main thread."""

    text: str
    """One line, if that says everything; else the traceback."""
    trace: str = ""
    """The traceback, if it is not in `text`."""
    is_for_user: bool = False
    """Whether the user must fix something first: the same command would fail again."""
    is_consequence: bool = False
    """Whether it only says that another rank or engine could not be reached."""


@dataclass(frozen=True)
class End:
    """The end of the job: every rank exits with `code`."""

    code: int
    text: str = ""
    stacks: str = ""
    """For the stacks file: the stacks of all ranks, or the traceback that `text` leaves out."""


@dataclass(frozen=True)
class _Cause:
    time: float
    end: End
    is_consequence: bool = False


class Job:
    """The ranks of a job as rank 0 sees them."""

    def __init__(self, world_size: int, limits: Limits, pace: Pace, now: float) -> None:
        self.members: dict[int, Member] = {}
        self._world_size, self._limits, self._pace = world_size, limits, pace
        self._progress = now
        self._asked: float | None = None
        self._causes: list[_Cause] = []
        self._first_step = 0
        self._leaving: dict[int, End] = {}

    @property
    def position(self) -> Position:
        """Position of rank 0, which determines the limit: the others may wait for it for long."""
        return self.members[0].position if 0 in self.members else Position()

    def join(self, rank: int, host: str, pid: int, now: float) -> None:
        """A rank has connected."""
        self.members[rank] = Member(rank, host, pid, now)
        self._moved(now)

    def beat(self, rank: int, position: Position, now: float) -> None:
        """A rank has sent a heartbeat with its `position`."""
        member = self.members[rank]
        member.heard = now
        if position != member.position:
            member.position = position
            self._first_step = self._first_step or self.position.step
            self._moved(now)

    def failed(self, rank: int, failure: Failure, now: float) -> None:
        """The main thread of a rank has raised an exception."""
        member = self.members[rank]
        member.has_told = True
        code = EXIT_FOR_THE_USER if failure.is_for_user else EXIT_FAILURE
        place = f"{member} failed in {member.position}"
        if failure.trace:
            end = End(code, f"megatron-grpo: {failure.text}", f"{place}:\n{failure.trace}\n")
        else:
            end = End(code, f"megatron-grpo: {place}:\n{failure.text}")
        self._causes.append(_Cause(now, end, failure.is_consequence))

    def lost(self, rank: int, now: float) -> None:
        """The connection to a rank is closed, so its process is gone."""
        member = self.members[rank]
        if member.has_told:
            return
        member.has_told = True
        text = "\n".join([f"megatron-grpo: {member} died in {member.position}", *member.dump])
        self._causes.append(_Cause(now, End(EXIT_FAILURE, text)))

    def leaves(self, rank: int, end: End, now: float) -> None:
        """A rank is done and waits for the others."""
        self.members[rank].has_told = True
        self._leaving[rank] = end
        self._moved(now)

    def over(self, end: End, now: float) -> None:
        """A rank says that the job is over."""
        self._causes.append(_Cause(now, end))

    def wants_stacks(self, now: float) -> bool:
        """Whether to ask all ranks for their stacks now; True only once until there is progress."""
        limit = self._limit()
        if self._asked is not None or limit is None or now - self._progress < limit.seconds:
            return False
        self._asked = now
        for member in self.members.values():
            member.stack = None
        return True

    def end(self, now: float) -> End | None:
        """How the job ends, once that is known; None while it goes on."""
        if self._causes:
            if now - self._causes[0].time < self._pace.settle:
                return None
            return min(self._causes, key=lambda cause: cause.is_consequence).end
        if len(self._leaving) == self._world_size:
            return self._leaving[0]
        if silent := [m for m in self.members.values() if now - m.heard >= self._pace.silence]:
            return End(EXIT_FAILURE, _silent(silent, self._pace.silence))
        if self._asked is None:
            return None
        answered = all(member.stack is not None for member in self.members.values())
        return self._hang() if answered or now - self._asked >= self._pace.stacks else None

    def _moved(self, now: float) -> None:
        self._progress, self._asked = now, None

    def _limit(self) -> Limit | None:
        position = self.position
        is_first_step = position.step <= self._first_step
        return self._limits.of_phase(position.phase, is_first_step=is_first_step)

    def _hang(self) -> End:
        limit = self._limit()
        assert limit is not None
        lines = [
            f"megatron-grpo: no rank has made progress for {limit.seconds:g} s ({limit.key}); "
            f"rank 0 is in {self.position}"
        ]
        if missing := sorted(set(range(self._world_size)) - self.members.keys()):
            lines += [f"never joined the job: rank {', '.join(map(str, missing))}"]
        else:
            lines += self._suspects()
        stacks = [f"{m}, {m.position}:\n{m.stack}\n" for m in self._sorted()]
        return End(EXIT_FAILURE, "\n".join(lines), "\n".join(stacks))

    def _suspects(self) -> list[str]:
        """The ranks that the others wait for, with their stacks; rank 0 if all wait alike."""
        told = {m.rank: m.stack for m in self._sorted() if m.stack is not None}
        odd = [member.rank for member in self._sorted() if member.rank not in told]
        if not odd:
            progress = {
                rank: (member.position.step, member.position.num_ticks)
                for rank, member in self.members.items()
            }
            odd = stragglers(told, progress)
        if not odd:
            return [f"all ranks wait alike; {self.members[0]}:", told[0]]
        lines = [f"{len(odd)} of {self._world_size} ranks are not where the others are:"]
        for member in (self.members[rank] for rank in odd[:NUM_RANKS_SHOWN]):
            stack = "it did not report its stack" if member.stack is None else member.stack
            lines += [f"{member}, {member.position}:", stack]
        return lines

    def _sorted(self) -> list[Member]:
        return [self.members[rank] for rank in sorted(self.members)]


def _silent(members: Sequence[Member], seconds: float) -> str:
    lines = []
    for member in members[:NUM_RANKS_SHOWN]:
        lines += [
            f"{member}, in {member.position}, has not answered for {seconds:g} s: it is stopped, "
            "or its host is gone",
            *member.dump,
        ]
    if len(members) > NUM_RANKS_SHOWN:
        lines += [f"and {len(members) - NUM_RANKS_SHOWN} other ranks"]
    return "\n".join(["megatron-grpo: " + lines[0], *lines[1:]])
