"""torchrun with different handling of failures, signals and the rendezvous.

A failure is reported in a few lines instead of pages, and only if the ranks have not reported it:
their watch has ended the job by then. Preemption signals are forwarded to the ranks, which save and
exit. The rendezvous listens on one address, where torch's own ones listen on all: use
`--rdzv-backend=loopback` for ranks on one host, and `--rdzv-backend=fabric` for several, with
`--rdzv-endpoint=ADDRESS:PORT` of the first host and, on each, `--rdzv-conf=rank=N` and `--log-dir`.
"""

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, Store, TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_grpo.launch.open_files import allow_open_files
from megatron_grpo.launch.preemption import EXIT_PREEMPTED, PREEMPTION_SIGNALS

LOOPBACK, FABRIC = "loopback", "fabric"
MEETING_SECONDS = 600
"""Time in which the torchruns of all hosts must join the rendezvous."""
LOOK_SECONDS = 0.05
"""Polling interval while hosts are missing."""
NUM_LINES_SHOWN = 30
VERDICT = re.compile(r"^megatron-grpo: .*", re.MULTILINE | re.DOTALL)
"""The verdict of the watch, at the end of a rank's log."""


class BoundRendezvous(StaticTCPRendezvous):
    """The rendezvous of a job's torchruns with each other and with their ranks.

    It listens on exactly one address; if `port` is 0, the kernel chooses a port.
    """

    def __init__(
        self, backend: str, run_id: str, host: str, port: int, rank: int = 0, num_hosts: int = 1
    ) -> None:
        super().__init__(host, port, rank, num_hosts, run_id, MEETING_SECONDS)
        self._backend = backend
        if rank == 0:
            listener = socket.create_server((host, port))
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                host,
                self.master_port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def get_backend(self) -> str:
        """Its name on the command line."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the rendezvous; the first host waits for all and names those that do not join."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            meeting = super().next_rendezvous()
        except DistError as error:
            raise RendezvousConnectionError(
                f"host {self.rank} ({socket.gethostname()}) did not reach the first of the "
                f"{self.world_size} at {self._where} within {self.timeout.seconds} s: "
                f"{str(error).splitlines()[0]}"
            ) from None
        meeting.store.set(f"came/{self.rank}", "")
        while self.rank == 0 and (missing := self._missing(meeting.store)):
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{len(missing)} of {self.world_size} hosts did not come to {self._where} on "
                    f"{socket.gethostname()} within {self.timeout.seconds} s: host "
                    f"{', '.join(map(str, missing))}, counted from 0; their logs may say why"
                )
            time.sleep(LOOK_SECONDS)
        return meeting

    @property
    def _where(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    def _missing(self, store: Store) -> list[int]:
        return [host for host in range(self.world_size) if not store.check([f"came/{host}"])]


def _loopback(parameters: RendezvousParameters) -> BoundRendezvous:
    return BoundRendezvous(LOOPBACK, parameters.run_id, "127.0.0.1", 0)


def _fabric(parameters: RendezvousParameters) -> BoundRendezvous:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank = int(parameters.config["rank"])
    return BoundRendezvous(FABRIC, parameters.run_id, host, port, rank, parameters.max_nodes)


def main() -> None:
    """Run torchrun with the command line; exits with the code of the ranks, 1 if killed."""
    allow_open_files()
    arguments = run.parse_args(sys.argv[1:])
    arguments.signals_to_handle = ",".join(_ending_signals())
    forwarded = set[int]()

    def forward(number: int, _: FrameType | None) -> None:
        forwarded.add(number)
        ranks = _children()
        for rank in ranks:
            os.kill(rank, number)
        if not ranks:
            sys.exit(EXIT_PREEMPTED)

    for number in PREEMPTION_SIGNALS:
        signal.signal(number, forward)
    rendezvous_handler_registry.register(LOOPBACK, _loopback)
    rendezvous_handler_registry.register(FABRIC, _fabric)
    logging.disable(logging.ERROR)  # torchrun's own failure report; ours is below
    try:
        run.run(arguments)
    except ChildFailedError as error:
        # Ranks that got the forwarded signal before they had a handler for it have died of it.
        codes = [failure.exitcode for failure in error.failures.values()]
        if all(code == EXIT_PREEMPTED or -code in forwarded for code in codes):
            sys.exit(EXIT_PREEMPTED)
        if account := _account(error.failures, Path(arguments.log_dir)):
            print(account, file=sys.stderr)
        sys.exit(next((code for code in codes if code > 0), 1))
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except RendezvousError as error:
        sys.exit(f"megatron-grpo: {error}")
    except DistError:
        sys.exit(f"{socket.gethostname()}: the first host left before all hosts had joined")


def _ending_signals() -> list[str]:
    """The signals on which torchrun ends its ranks, killing those that take too long.

    Signals that this process was started to ignore (by `nohup` or a script's `&`) are left out: a
    handler would undo that.
    """
    names = ("SIGINT", "SIGHUP", "SIGQUIT")
    return [name for name in names if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]


def _children() -> list[int]:
    """The ranks on this host."""
    thread = threading.main_thread().native_id
    return [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()]


def _account(failures: Mapping[int, ProcessFailure], log_dir: Path) -> str:
    """The report of a failure that no rank has reported itself; else an empty string.

    It is about the rank that failed first. On a host without rank 0 it is empty if the watch ended
    the ranks, as rank 0 reports that.
    """
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    has_rank_0 = first == failures[first].local_rank
    logs = {rank: _log(failure, log_dir) for rank, failure in failures.items()}
    if not has_rank_0 and any(
        VERDICT.search(log.read_text(errors="replace")) for log in logs.values()
    ):
        return ""
    if 0 in failures and failures[0].exitcode > 0:
        return ""  # it has the terminal and has reported the failure
    if first > 0:
        return _last_words(first, logs[first])
    ended = failures[0].signal_name()
    if others := [rank for rank in failures if rank > 0]:
        return f"{_last_words(others[0], logs[others[0]])} ({ended})"
    return f"megatron-grpo: rank 0 on {socket.gethostname()} was ended by {ended}"


def _last_words(rank: int, log: Path) -> str:
    text = log.read_text(errors="replace").rstrip()
    if verdict := VERDICT.search(text):
        return verdict.group()
    first = f"rank {rank} failed first on {socket.gethostname()}; {log} ends with"
    return "\n".join([first, *text.splitlines()[-NUM_LINES_SHOWN:]])


def _log(failure: ProcessFailure, log_dir: Path) -> Path:
    """The rank's stderr file, below a folder that torchrun gives a random name."""
    logs = log_dir.glob(f"*/attempt_0/{failure.local_rank}")
    return max(logs, key=lambda path: path.stat().st_mtime) / "stderr.log"


if __name__ == "__main__":
    main()
