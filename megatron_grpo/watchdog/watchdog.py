"""The watchdog of a rank, as its main thread uses it.

Collectives of the main thread cannot be interrupted: a second thread talks to a server on rank 0
(`connections.py`), which tracks all ranks (`job.py`), and ends the process when the job is over.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from torch.distributed import DistError, Store

from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.hooks import HookError
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.launch.process import (
    EXIT_PREEMPTED,
    PREEMPTION_SIGNALS,
    Preempted,
    is_user_error,
)
from megatron_grpo.launch.run_dir import interrupted_text
from megatron_grpo.rewards.scoring import RewardError
from megatron_grpo.watchdog.connections import Heartbeat, ServerAddress, WatchdogServer, connect
from megatron_grpo.watchdog.job import (
    EXIT_FAILURE,
    INTERVALS,
    End,
    Failure,
    Intervals,
    Limits,
    Position,
)
from parallel.addresses import address_of

MAX_TEXT = 1 << 15
AGREED = (Preempted, RolloutAborted)
"""Exceptions that all ranks raise together, after saving."""
NOTHING_TO_SAVE = End(
    EXIT_PREEMPTED, "megatron-grpo: preempted before the first step; the same command resumes"
)
STORE_KEY = "megatron-grpo/watchdog"


class Watchdog:
    """The watchdog of one rank; each rank creates it with the job's `store` and `token`, the same
    for all ranks, and enters its context.

    Whatever ends the block on one rank ends all ranks within seconds: an exception, Preempted, a
    death, a hang, SIGINT. The process then exits inside the context with the job's exit code, and
    rank 0 prints the reason; logs/stacks.txt in `run_dir` has the stacks of all ranks after a hang,
    or the traceback of an error that is reported as one line. All ranks leave the context together.
    """

    def __init__(
        self,
        place: RankPlace,
        store: Store,
        limits: Limits,
        run_dir: Path,
        intervals: Intervals = INTERVALS,
        token: str = "",
    ) -> None:
        self._place = place
        self._position = Position()
        self.is_preempted = False
        """Whether any rank of the job has received SIGTERM or SIGUSR1."""
        self._callbacks: list[Callable[[], None]] = []
        self._has_reported = False
        self._server = None
        host = server_host(place, store)
        if place.rank == 0:
            stacks = run_dir / "logs" / "stacks.txt"
            size = place.world_size
            self._server = WatchdogServer(host, size, limits, stacks, intervals, token)
            store.set(STORE_KEY, json.dumps(asdict(self._server.address)))
        address = ServerAddress(**json.loads(store.get(STORE_KEY)))
        connection = connect(address, place.rank, token, intervals.silence)
        self._heartbeat = Heartbeat(
            connection,
            address.rank_0,
            place,
            intervals,
            lambda: self._position,
            self._preempt,
            lambda: interrupted_text(run_dir),
        )

    def __enter__(self) -> "Watchdog":
        # Handlers that do nothing: without one, no number reaches the heartbeat thread's socket.
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._close)
        self._heartbeat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._heartbeat.send(finished=asdict(End(0)))
        elif isinstance(error, AGREED):
            code = EXIT_PREEMPTED if isinstance(error, Preempted) else EXIT_FAILURE
            self._heartbeat.send(finished=asdict(End(code, f"megatron-grpo: {error}")))
        else:
            self.report(kind, error, trace)
        self._heartbeat.join()  # returns if all ranks succeed; else the process ends in it
        if self._server is not None:
            self._server.join()
        self._close()

    def begin_step(self, step: int) -> None:
        """Record that the main thread begins optimizer step `step`, counted from 1."""
        self._position = replace(self._position, step=step, num_ticks=0)

    def enter(self, phase: str) -> None:
        """Record that the main thread enters the phase `phase` of the step."""
        before = self._position
        self._position = replace(before, phase=phase, num_phases=before.num_phases + 1)
        self._heartbeat.send(heartbeat=asdict(self._position))

    def tick(self, *_: object) -> None:
        """Record progress by one microbatch, as a forward pre-hook of models."""
        self._position = replace(self._position, num_ticks=self._position.num_ticks + 1)

    def on_preempt(self, callback: Callable[[], None]) -> None:
        """Call `callback` on preemption, usually from another thread, and possibly twice."""
        # This order: a preemption between the two lines calls it twice rather than never.
        self._callbacks.append(callback)
        if self.is_preempted:
            callback()

    def report(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Report the first exception of the main thread to all ranks; for `ExitStack.push`, as
        closing the rest of the stack may take seconds."""
        if error is None or self._has_reported or isinstance(error, (*AGREED, KeyboardInterrupt)):
            return
        self._has_reported = True
        self._heartbeat.is_unwinding.set()
        self._heartbeat.send(heartbeat=asdict(self._position))  # the exact position of the failure
        self._heartbeat.send(failure=asdict(_failure(error, self._position.step)))
        if self._place.has_own_log:
            traceback.print_exception(kind, error, trace, file=sys.stderr)

    def _preempt(self) -> None:
        if self.is_preempted:
            return
        self.is_preempted = True
        for callback in self._callbacks:
            callback()
        if self._place.rank == 0 and self._position.step == 0:
            self._heartbeat.send(stop=asdict(NOTHING_TO_SAVE))

    def _close(self) -> None:
        self._heartbeat.close()
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def server_host(place: RankPlace, store: Store) -> str:
    """The address on which rank 0 listens: loopback for one host, else on the ranks' network."""
    if place.num_hosts == 1:
        return "127.0.0.1"
    # The last rank resolves it: on rank 0's own host the name may resolve to loopback.
    if place.rank == place.world_size - 1:
        store.set(f"{STORE_KEY}/host", address_of(os.environ["MASTER_ADDR"]))
    return str(store.get(f"{STORE_KEY}/host").decode())


def _failure(error: BaseException, step: int) -> Failure:
    """Convert an exception in optimizer step `step` to the rank's report: message or traceback.

    In step 0, a ValueError, OSError or ModuleNotFoundError is the user's to fix (config, data,
    files or packages), unless it is transient. In later steps the same command may succeed.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()[-MAX_TEXT:]
    may_be_input = isinstance(error, (ValueError, OSError, ModuleNotFoundError))
    # A lost connection: another rank, or an engine, has failed first.
    is_consequence = (
        isinstance(error, ConnectionError)
        if may_be_input
        else isinstance(error, DistError) or "gloo" in trace
    )
    is_early = may_be_input and step == 0
    is_for_user = is_early and is_user_error(error)
    # System errors (with errno) say neither what was tried nor where.
    has_own_message = isinstance(error, OSError) and error.errno is None
    of_user_code = isinstance(error, (RewardError, HookError))
    if str(error) and (is_early or has_own_message or of_user_code):
        return Failure(str(error), trace, is_for_user, is_consequence)
    return Failure(trace, "", is_for_user, is_consequence)
