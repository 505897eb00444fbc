"""State machine of a job on rank 0: events of all ranks in, the verdict out.

It never waits or reads a clock: every event comes with its time. Each phase of a step has a limit
for the time without progress: at least `SLACK` times its longest in this run. Beyond the limit, the
stacks of all main threads are compared. While a rank computes, all have up to `COMPUTING` times the
limit; then, or if no rank computes, stragglers are named.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from megatron_grpo.config.config import Config
from megatron_grpo.timing import WAIT
from megatron_grpo.watchdog.stacks import WAITS, place_of, stragglers
from parallel.weight_transfer import TIMEOUT
from parallel.words import counted

MARGIN_SECONDS = 15.0
"""Added to limits of waits with timeouts of their own, so that the timeouts come first."""

HANG_SECONDS, HANG_SECONDS_ON_GPU = 45.0, 300.0
"""Defaults of `train.hang_timeout`."""

SLACK = 2.0
"""A phase's limit is at least this multiple of its longest time without progress so far."""
COMPUTING = 4
"""Number of limits that may pass while a rank computes; an endless loop computes as well."""
COMPUTING_SHARE = 0.1
"""Least share of a CPU of a main thread that computes; on a busy host it gets no more."""

START = "start"
"""The phase before the first step, while engines start; weights are read in the phase `load`."""


@dataclass(frozen=True)
class Limit:
    """A limit in seconds, and the config key that sets it."""

    seconds: float
    key: str


SECONDS = attrgetter("seconds")


@dataclass(frozen=True)
class Limits:
    """The longest times without progress on any rank, by phase of rank 0."""

    start: Limit
    step: Limit
    push: Limit
    is_cpu_progress: bool = True
    """Whether use of the CPU outside of collectives counts as computing. On GPUs it does not: CUDA
    waits by spinning."""

    @classmethod
    def from_config(cls, cfg: Config, *, on_gpu: bool) -> "Limits":
        """Derive the limits from the time-outs of the config; see docs/cluster.md."""
        rollout = cfg.rollout
        # After TIMEOUT without traffic a channel fails, after `stall_timeout` its engine counts as
        # lost, and the push is repeated.
        waits = TIMEOUT.total_seconds() + rollout.stall_timeout
        push = Limit(waits + MARGIN_SECONDS, "rollout.stall_timeout")
        seconds = cfg.train.hang_timeout or (HANG_SECONDS_ON_GPU if on_gpu else HANG_SECONDS)
        step = Limit(seconds, "train.hang_timeout")
        return cls(
            start=Limit(rollout.startup_timeout + MARGIN_SECONDS, "rollout.startup_timeout"),
            step=step,
            push=max(push, step, key=SECONDS),
            is_cpu_progress=not on_gpu,
        )

    def for_phase(self, phase: str, *, is_first_step: bool) -> Limit | None:
        """Limit while rank 0 is in `phase`; None without one: files may be slow, and engines and
        rewards have limits of their own. A process's first step gets more time, for compiling
        kernels and making connections."""
        match phase.removeprefix(f"{WAIT}_").removeprefix("eval_"):
            case "await_engines":
                return self.start
            case "load" | "generate" | "score" | "log" | "save" | "close" | "sleep":
                return None
            case "push" | "verify_weights":
                usual = self.push
            case _:
                usual = self.step
        return max(self.start, usual, key=SECONDS) if is_first_step else usual


EXIT_FAILURE = 1
EXIT_FOR_THE_USER = 2
NUM_RANKS_SHOWN = 3


@dataclass(frozen=True)
class Intervals:
    """Intervals and time limits of the watchdog, in seconds."""

    heartbeat: float = 1.0
    """Between two heartbeats of a rank, and of rank 0's server."""
    silence: float = 20.0
    """Time without a heartbeat until a rank counts as stopped."""
    kill: float = 30.0
    """Time without a heartbeat until the rank's own sentinel kills the process."""
    grace: float = 0.5
    """Time from the first report to the verdict: effects may be reported before their cause."""
    stacks: float = 2.0
    """Time for ranks to report their stacks."""
    unwind: float = 5.0
    """Time for rank 0 to close its engines and files before it exits."""


INTERVALS = Intervals()


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
    """A rank that has connected to the server."""

    rank: int
    host: str
    pid: int
    heard: float
    """Time of its last heartbeat."""
    since: float
    """Time of the last change of its position."""
    position: Position = Position()
    cpu: float = 0.0
    """CPU seconds of its main thread."""
    cpu_before: float = 0.0
    """CPU seconds at the last progress, or at the last comparison of stacks."""
    stack: str | None = None
    """Stack of its main thread; None until it answers the last request for stacks."""
    dump: list[str] = field(default_factory=list)
    """Lines of Python's faulthandler: at a crash, or while another thread holds the GIL."""
    has_reported: bool = False
    """Whether it has finished or failed, and reported so: then its exit is expected."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Failure:
    """A rank's report of the exception that ended its main thread."""

    text: str
    """The message, if that is enough; else the traceback."""
    trace: str = ""
    """The traceback, if `text` is the message."""
    is_for_user: bool = False
    """Whether the same command would fail again: the user must fix something first."""
    is_consequence: bool = False
    """Whether another rank or engine could not be reached, whose failure is the cause."""


@dataclass(frozen=True)
class End:
    """The end of the job: every rank exits with `code`."""

    code: int
    text: str = ""
    stacks: str = ""
    """Text for the stacks file: stacks of all ranks, or the traceback that `text` leaves out."""


@dataclass(frozen=True)
class _Cause:
    time: float
    end: End
    is_consequence: bool = False


class Job:
    """The ranks of a job as rank 0 sees them."""

    def __init__(self, world_size: int, limits: Limits, intervals: Intervals, now: float) -> None:
        self.members: dict[int, Member] = {}
        self._world_size, self._limits, self._intervals = world_size, limits, intervals
        self._progress = now
        self._stacks_requested: float | None = None
        self._last_comparison, self._num_limits = now, 1
        """Time of the last progress or comparison of stacks, and the number of limits after the
        last progress at which stacks are compared next."""
        self._longest_stall = 0.0
        """The longest time without progress in the current phase of rank 0."""
        self._longest: dict[str, float] = {}
        """The longest time without progress in each finished phase."""
        self._causes: list[_Cause] = []
        self._first_step = 0
        self._finished: dict[int, End] = {}

    @property
    def position(self) -> Position:
        """Position of rank 0, which determines the limit: the other ranks may wait for it."""
        return self.members[0].position if 0 in self.members else Position()

    def on_connect(self, rank: int, host: str, pid: int, now: float) -> None:
        """A rank has connected, from process `pid` of `host`."""
        self.members[rank] = Member(rank, host, pid, now, now)
        self._reset_progress(now)

    def on_heartbeat(self, rank: int, position: Position, now: float, cpu: float = 0.0) -> None:
        """A rank has sent a heartbeat with its `position` and its main thread's CPU seconds."""
        member = self.members[rank]
        # `_last_comparison` moves with any rank's progress: members follow at their next heartbeat.
        if member.heard <= self._last_comparison:
            member.cpu_before = member.cpu
        member.heard = now
        member.cpu = max(member.cpu, cpu)  # a heartbeat for a new phase brings 0
        if position != member.position:
            self._longest_stall = max(self._longest_stall, now - self._progress)
            if rank == 0 and position.phase != (phase := member.position.phase):
                self._longest[phase] = max(self._longest_stall, self._longest.get(phase, 0.0))
                self._longest_stall = 0.0
            member.position, member.since = position, now
            self._first_step = self._first_step or self.position.step
            self._reset_progress(now)

    def on_exception(self, rank: int, failure: Failure, now: float) -> None:
        """The main thread of a rank has raised an exception."""
        member = self.members[rank]
        member.has_reported = True
        code = EXIT_FOR_THE_USER if failure.is_for_user else EXIT_FAILURE
        place = f"{member} failed in {member.position}"
        if failure.trace:
            end = End(code, f"megatron-grpo: {failure.text}", f"{place}:\n{failure.trace}\n")
        else:
            end = End(code, f"megatron-grpo: {place}:\n{failure.text}")
        self._causes.append(_Cause(now, end, failure.is_consequence))

    def on_disconnect(self, rank: int, now: float) -> None:
        """The connection to a rank is closed: its process has ended."""
        member = self.members[rank]
        if member.has_reported:
            return
        member.has_reported = True
        text = "\n".join([f"megatron-grpo: {member} died in {member.position}", *member.dump])
        self._causes.append(_Cause(now, End(EXIT_FAILURE, text)))

    def on_finish(self, rank: int, end: End, now: float) -> None:
        """A rank has finished with `end`, and waits for the others."""
        self.members[rank].has_reported = True
        self._finished[rank] = end
        self._reset_progress(now)

    def on_stop(self, end: End, now: float) -> None:
        """A rank wants to end the job: interrupted, or preempted with nothing to save."""
        self._causes.append(_Cause(now, end))

    def wants_stacks(self, now: float) -> bool:
        """Whether to ask all ranks for stacks now; True once for each limit that passes."""
        limit = self._limit()
        if self._stacks_requested is not None or limit is None:
            return False
        if now - self._progress < self._num_limits * limit.seconds:
            return False
        self._stacks_requested = now
        for member in self.members.values():
            member.stack = None
        return True

    def verdict(self, now: float) -> End | None:
        """The end of the job; None while it goes on."""
        if self._causes:
            if now - self._causes[0].time < self._intervals.grace:
                return None
            # The first that is no consequence, or else the first.
            return min(self._causes, key=lambda cause: cause.is_consequence).end
        if len(self._finished) == self._world_size:
            return self._finished[0]
        if silent := [m for m in self.members.values() if now - m.heard >= self._intervals.silence]:
            return End(EXIT_FAILURE, _silent(silent, self._intervals.silence))
        if self._stacks_requested is None:
            return None
        answered = all(member.stack is not None for member in self.members.values())
        if not answered and now - self._stacks_requested < self._intervals.stacks:
            return None
        if answered and self._num_limits < COMPUTING and self._is_computing(now):
            self._num_limits += 1
            self._last_comparison, self._stacks_requested = now, None
            return None
        return self._hang(now)

    def _reset_progress(self, now: float) -> None:
        # No loop over the members: each of 1,024 ranks makes progress every second.
        self._progress = self._last_comparison = now
        self._num_limits, self._stacks_requested = 1, None

    def _is_computing(self, now: float) -> bool:
        """Whether a rank outside of collectives has used the CPU since the last comparison."""
        if not self._limits.is_cpu_progress:
            return False
        least = COMPUTING_SHARE * (now - self._last_comparison)
        return any(
            member.cpu - member.cpu_before >= least and not WAITS.search(member.stack or "")
            for member in self.members.values()
            if member.heard > self._last_comparison  # else its CPU seconds are from before
        )

    def _limit(self) -> Limit | None:
        position = self.position
        is_first_step = position.step <= self._first_step
        limit = self._limits.for_phase(position.phase, is_first_step=is_first_step)
        if limit is None:
            return None
        usual = SLACK * self._longest.get(position.phase, 0.0)
        return replace(limit, seconds=max(limit.seconds, usual))

    def _hang(self, now: float) -> End:
        limit = self._limit()
        assert limit is not None
        seconds = self._num_limits * limit.seconds
        lines = [
            f"megatron-grpo: no rank has made progress for {round(seconds, 1):g} s ({limit.key}); "
            f"rank 0 is in {self.position}; if that is only slow, set "
            f"{limit.key}={math.ceil(SLACK * seconds)}"
        ]
        if missing := sorted(set(range(self._world_size)) - self.members.keys()):
            lines += [f"never joined the job: rank {', '.join(map(str, missing))}"]
        else:
            lines += self._suspects(now)
        lines += ["the stacks of all ranks are in logs/stacks.txt"]
        stacks = [f"{m}, {m.position}:\n{m.stack}\n" for m in self._sorted()]
        return End(EXIT_FAILURE, "\n".join(lines), "\n".join(stacks))

    def _suspects(self, now: float) -> list[str]:
        """Lines about the stragglers and their places; about rank 0 if all ranks wait alike."""
        stacks = {m.rank: m.stack for m in self._sorted() if m.stack is not None}
        suspects = [member.rank for member in self._sorted() if member.rank not in stacks]
        if not suspects:
            progress = {
                rank: (member.position.step, member.position.num_ticks)
                for rank, member in self.members.items()
            }
            suspects = stragglers(stacks, progress)
        if suspects:
            lines = [f"stragglers, {len(suspects)} of {self._world_size} ranks:"]
        else:
            lines, suspects = ["all ranks wait alike:"], [0]
        for member in (self.members[rank] for rank in suspects[:NUM_RANKS_SHOWN]):
            stack = member.stack
            place = "it did not report its stack" if stack is None else place_of(stack)
            stood = f"has stood for {now - member.since:.0f} s"
            lines += [f"{member}, {member.position}, {stood}: {place}"]
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
        lines += [f"and {counted(len(members) - NUM_RANKS_SHOWN, 'other rank')}"]
    return "\n".join(["megatron-grpo: " + lines[0], *lines[1:]])
