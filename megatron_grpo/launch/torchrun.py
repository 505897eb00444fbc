"""torchrun, except for what it does about the end of a rank.

A failure is told in lines and not in pages, and only what the ranks have not told themselves: their
watch has ended the job by then. Signals that announce the end of the machine go on to the ranks,
which save and leave. And the meeting listens on one address, where torch's own listen on all:
`--rdzv-backend=loopback` for ranks on one host; over several `--rdzv-backend=fabric`, with the
`--rdzv-endpoint=ADDRESS:PORT` of the first and the `--rdzv-conf=rank=N` and a `--log-dir` of each.
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
"""Until the torchruns of all hosts must have come."""
LOOK_SECONDS = 0.05
"""Between two looks at who has come."""
NUM_LINES_SHOWN = 30
VERDICT = re.compile(r"^megatron-grpo: .*", re.MULTILINE | re.DOTALL)
"""What a rank has been told by its watch, at the end of its log."""


class BoundRendezvous(StaticTCPRendezvous):
    """The meeting of the torchruns of a job with each other and with their ranks.

    It listens on one address and no other; on a `port` that the kernel chooses where that is 0.
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
        """Come to the meeting; the first host waits for all, and names those that do not come."""
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
    """Run torchrun on the command line; the exit code is the ranks', 1 if they were killed."""
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
    logging.disable(logging.ERROR)  # torchrun's account of a failure: ours is below
    try:
        run.run(arguments)
    except ChildFailedError as error:
        # Ranks that the forwarded signal has met before they were able to take it have died of it.
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
        sys.exit(f"{socket.gethostname()}: the first host has left before all had come")


def _ending_signals() -> list[str]:
    """What torchrun answers by ending its ranks, where it kills those that take long.

    Not what `nohup`, or a script's `&`, has told this process to ignore: with a handler it would
    no longer be.
    """
    names = ("SIGINT", "SIGHUP", "SIGQUIT")
    return [name for name in names if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]


def _children() -> list[int]:
    """The ranks on this host."""
    thread = threading.main_thread().native_id
    return [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()]


def _account(failures: Mapping[int, ProcessFailure], log_dir: Path) -> str:
    """What nobody has told: of rank 0 if it was killed, else of the rank that failed before it.

    On a host without rank 0, nothing where the watch has ended the ranks: rank 0 has told of that.
    """
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    has_rank_0 = first == failures[first].local_rank
    logs = {rank: _log(failure, log_dir) for rank, failure in failures.items()}
    if not has_rank_0 and any(
        VERDICT.search(log.read_text(errors="replace")) for log in logs.values()
    ):
        return ""
    if 0 in failures and failures[0].exitcode > 0:
        return ""  # it has the terminal, and has told
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
    """Torchrun puts a folder with a random name between."""
    logs = log_dir.glob(f"*/attempt_0/{failure.local_rank}")
    return max(logs, key=lambda path: path.stat().st_mtime) / "stderr.log"


if __name__ == "__main__":
    main()
