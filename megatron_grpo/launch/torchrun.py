"""torchrun with the exit codes, signals and messages of a run, over torch's static rendezvous.

Failures that the ranks' watchdog has not reported take a few lines instead of pages. Preemption
signals are forwarded to the ranks. Rank 0 writes to the terminal, every other rank to a file of its
own in `--log-dir`. The store listens on `--master-addr` alone, not on all interfaces; with
`--master-port=0` at any free port. `--nnodes`, `--master-port` and `--log-dir` are required.
"""

import logging
import os
import re
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from checkpoint_convert.utf8_mode import enter_utf8_mode
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE, OWN_LOGS_VARIABLE
from megatron_grpo.launch.network import check_reachable
from megatron_grpo.launch.parent_death import children
from megatron_grpo.launch.process import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PREEMPTION_SIGNALS,
    START_SIGNALS,
    allow_open_files,
)
from megatron_grpo.launch.run_dir import interrupted_text
from parallel.clock import running_time
from parallel.store import serve_store

RENDEZVOUS_SECONDS = 600
"""Time in which the torchruns of all hosts must connect."""
SILENT_SECONDS = 10
"""A wait for the first host that takes longer is printed."""
POLL_SECONDS = 0.05
"""Polling interval while hosts are missing: a wait in torch's store would delay signals."""
ORPHAN_SECONDS = 20
"""Time that ranks have to end by themselves once the first host's launcher has ended."""
NUM_LINES_SHOWN = 30
VERDICT = re.compile(r"^megatron-grpo: .*", re.MULTILINE | re.DOTALL)
"""The verdict of the watchdog, at the end of a rank's log."""


def main() -> None:
    """Run torchrun with the command line; exits with the code of the ranks, 1 if killed."""
    enter_utf8_mode()
    allow_open_files()
    arguments = run.parse_args(sys.argv[1:])
    _redirect(arguments)
    # Not the signals that this process was started to ignore, as by `nohup`: a handler undoes that.
    arguments.signals_to_handle = ",".join(
        name
        for name in ("SIGINT", "SIGHUP", "SIGQUIT")
        if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    )
    forwarded = _forward_preemption()
    orphaned: list[str] = []
    logging.disable(logging.ERROR)  # torchrun's own failure report; ours is below
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, START_SIGNALS)
        # torch's static rendezvous takes the store that this process already has at the port.
        if arguments.node_rank == 0:
            store = _first_store(arguments)
        else:
            first = _connection(arguments)
            store = TCPStore(arguments.master_addr, arguments.master_port)
            store.set(f"host/{arguments.node_rank}", "")
            Thread(target=_end_orphans, args=(first, orphaned), daemon=True).start()
        arguments.master_port = store.port
        run.run(arguments)
    except ChildFailedError as error:
        # A rank without a handler yet dies of the forwarded signal, and not with EXIT_PREEMPTED.
        codes = [failure.exitcode for failure in error.failures.values()]
        if all(code == EXIT_PREEMPTED or -code in forwarded for code in codes):
            sys.exit(EXIT_PREEMPTED)
        if orphaned:
            sys.exit(orphaned[0])
        if report := _failure_report(error.failures, Path(arguments.log_dir)):
            print(report, file=sys.stderr)
        sys.exit(next((code for code in codes if code > 0), 1))
    except KeyboardInterrupt:  # before torch handles signals, and so before there are ranks
        if LAUNCHER_VARIABLE in os.environ:
            print(
                f"megatron-grpo: {interrupted_text(Path(arguments.log_dir).parent)}",
                file=sys.stderr,
            )
        sys.exit(EXIT_INTERRUPTED)
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except DistError:
        sys.exit(f"{socket.gethostname()}: the first host left before all hosts had joined")


def _redirect(arguments: Namespace) -> None:
    """Have every rank but rank 0 write to a file of its own in `--log-dir`."""
    own = range(int(arguments.node_rank == 0), int(arguments.nproc_per_node))
    arguments.redirects = ",".join(f"{rank}:3" for rank in own) or "0"
    os.environ[OWN_LOGS_VARIABLE] = "1"


def _forward_preemption() -> set[int]:
    """Forward preemption signals to the ranks; without ranks, exit. Returns the set of forwarded
    signals, which grows."""
    forwarded = set[int]()

    def forward(number: int, _: FrameType | None) -> None:
        forwarded.add(number)
        ranks = children(os.getpid())
        for rank in ranks:
            os.kill(rank, number)
        if not ranks:
            sys.exit(EXIT_PREEMPTED)

    for number in PREEMPTION_SIGNALS:
        signal.signal(number, forward)
    return forwarded


def _first_store(arguments: Namespace) -> TCPStore:
    """Serve the job's store on the first host; return it once all hosts have connected."""
    if int(arguments.nnodes) > 1:
        try:
            check_reachable(arguments.master_addr)
        except (ValueError, OSError) as error:
            sys.exit(f"megatron-grpo: {error}")
    store = serve_store(arguments.master_addr, arguments.master_port)
    hosts, deadline = range(1, int(arguments.nnodes)), running_time() + RENDEZVOUS_SECONDS
    while missing := [host for host in hosts if not store.check([f"host/{host}"])]:
        if running_time() > deadline:
            sys.exit(
                f"megatron-grpo: {len(missing)} of {arguments.nnodes} hosts did not connect to "
                f"{arguments.master_addr}:{store.port} on {socket.gethostname()} within "
                f"{RENDEZVOUS_SECONDS} s: host {', '.join(map(str, missing))}, counted from 0; "
                "their logs may say why"
            )
        time.sleep(POLL_SECONDS)
    return store


def _connection(arguments: Namespace) -> socket.socket:
    """A connection of a further host to the port of the job's store, once the first host has it."""
    place = f"{arguments.master_addr}:{arguments.master_port}"
    host = f"megatron-grpo: host {arguments.node_rank} ({socket.gethostname()})"
    start, is_silent = running_time(), True
    while True:
        try:
            # Not by torch's store, which prints a stack in C++ for each attempt.
            first = socket.create_connection((arguments.master_addr, arguments.master_port), 5.0)
        except OSError as error:
            if running_time() > start + RENDEZVOUS_SECONDS:
                sys.exit(
                    f"{host} did not reach the first of the {arguments.nnodes} at {place} within "
                    f"{RENDEZVOUS_SECONDS} s: {error}"
                )
            if is_silent and running_time() > start + SILENT_SECONDS:
                is_silent = False
                print(f"{host} waits for the first at {place}: {error}", file=sys.stderr)
            time.sleep(POLL_SECONDS)
        else:
            first.settimeout(None)
            return first


def _end_orphans(first: socket.socket, orphaned: list[str]) -> None:
    """Kill the ranks here some time after the launcher at the other end of `first` has ended, and
    put the reason into `orphaned`.

    Ranks that have met rank 0 end by themselves, with its watchdog. If rank 0 found a mistake
    before, they would try to reach it for an hour.
    """
    address = first.getpeername()[0]
    with suppress(OSError):
        first.recv(1)  # the store sends nothing
    time.sleep(ORPHAN_SECONDS)
    orphaned.append(
        f"megatron-grpo: the first host, {address}, has ended before the ranks on "
        f"{socket.gethostname()}: its log says why"
    )
    for rank in children(os.getpid()):
        os.kill(rank, signal.SIGKILL)


def _failure_report(failures: Mapping[int, ProcessFailure], log_dir: Path) -> str:
    """Report of the rank that failed first; empty if rank 0 has reported the failure itself, or if
    on another host a log has the watchdog's verdict."""
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    has_rank_0 = first == failures[first].local_rank
    logs = {rank: _log(failure, log_dir) for rank, failure in failures.items()}
    if not has_rank_0 and any(
        VERDICT.search(log.read_text(errors="replace", encoding="utf-8")) for log in logs.values()
    ):
        return ""
    if 0 in failures and failures[0].exitcode > 0:
        return ""  # rank 0 has the terminal, and has reported the failure there
    if first > 0:
        return _log_tail(first, logs[first])
    ended = failures[0].signal_name()
    if others := [rank for rank in failures if rank > 0]:
        return f"{_log_tail(others[0], logs[others[0]])} ({ended})"
    return f"megatron-grpo: rank 0 on {socket.gethostname()} was ended by {ended}"


def _log_tail(rank: int, log: Path) -> str:
    text = log.read_text(errors="replace", encoding="utf-8").rstrip()
    if verdict := VERDICT.search(text):
        return verdict.group()
    first = f"rank {rank} failed first on {socket.gethostname()}; {log} ends with"
    return "\n".join([first, *text.splitlines()[-NUM_LINES_SHOWN:]])


def _log(failure: ProcessFailure, log_dir: Path) -> Path:
    """Stderr file of a rank, below a folder to which torchrun gives a random name."""
    logs = log_dir.glob(f"*/attempt_0/{failure.local_rank}")
    return max(logs, key=lambda path: path.stat().st_mtime) / "stderr.log"


if __name__ == "__main__":
    main()
