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
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from checkpoint_convert.utf8_mode import enter_utf8_mode
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE, OWN_LOGS_VARIABLE
from megatron_grpo.launch.meeting import HostPlace, connect_to_first, serve_first
from megatron_grpo.launch.parent_death import children
from megatron_grpo.launch.process import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PREEMPTION_SIGNALS,
    START_SIGNALS,
    allow_open_files,
)
from megatron_grpo.launch.run_dir import interrupted_text

NUM_LINES_SHOWN = 30
VERDICT = re.compile(r"^megatron-grpo: .*", re.MULTILINE | re.DOTALL)
"""The verdict of the watchdog, at the end of a rank's log."""


def main() -> None:
    """Run torchrun with the command line; exits with the code of the ranks, 1 if killed."""
    enter_utf8_mode()
    allow_open_files()
    arguments = run.parse_args(sys.argv[1:])
    _redirect(arguments)
    place = HostPlace(
        int(arguments.nnodes),
        arguments.node_rank,
        arguments.master_addr,
        arguments.master_port,
    )
    # Not the signals that this process was started to ignore, as by `nohup`: a handler undoes that.
    arguments.signals_to_handle = ",".join(
        name
        for name in ("SIGINT", "SIGHUP", "SIGQUIT")
        if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    )
    forwarded = _forward_preemption()
    logging.disable(logging.ERROR)  # torchrun's own failure report; ours is below
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, START_SIGNALS)
        # torch's static rendezvous takes the store that this process already has at the port.
        if place.node_rank == 0:
            store = serve_first(place)
        else:
            connect_to_first(place).close()
            store = TCPStore(place.master_addr, place.master_port)
            store.set(f"host/{place.node_rank}", "")
        arguments.master_port = store.port
        run.run(arguments)
    except ChildFailedError as error:
        # A rank without a handler yet dies of the forwarded signal, and not with EXIT_PREEMPTED.
        codes = [failure.exitcode for failure in error.failures.values()]
        if all(code == EXIT_PREEMPTED or -code in forwarded for code in codes):
            sys.exit(EXIT_PREEMPTED)
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
