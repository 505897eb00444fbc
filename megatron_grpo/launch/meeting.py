"""The launchers of several hosts meet at a store, which the first host serves."""

import errno
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed import DistError, TCPStore

from megatron_grpo.launch.network import check_reachable
from megatron_grpo.launch.process import EXIT_PREEMPTED
from parallel.clock import running_time
from parallel.store import serve_store

RENDEZVOUS_SECONDS = 600
"""Time in which the launchers of all hosts must connect."""
SILENT_SECONDS = 10
"""A wait for the first host that takes longer is printed."""
POLL_SECONDS = 0.05
"""Polling interval while hosts are missing: a wait in torch's store would delay signals."""
WATCH_SECONDS = 0.5
CLOSE_SECONDS = 5.0
"""Longest wait for an answer of the store at the end, which a network that is down delays."""
FAILED = "failed"
"""Key at which the first host that fails publishes its exit code and message."""
PREEMPTED = "preempted"
"""Key at which a host without ranks publishes that it got a signal to save and stop."""


@dataclass(frozen=True)
class HostPlace:
    """This host's place among the hosts of a job, by the names of torchrun's options."""

    nnodes: int
    node_rank: int
    master_addr: str
    """Address or name of the first host."""
    master_port: int
    local_addr: str | None = None
    """Address of this host; None: the one on its route to the first host."""

    def __str__(self) -> str:
        return f"host {self.node_rank} ({socket.gethostname()})"


def serve_first(place: HostPlace) -> TCPStore:
    """Serve the store on the first host; return it once all hosts have set `host/RANK` in it."""
    try:
        if place.nnodes > 1 and place.local_addr is None:
            check_reachable(place.master_addr)
        # A pod's own name is known to Kubernetes' DNS only seconds after its start: hence its
        # address.
        store = serve_store(place.local_addr or place.master_addr, place.master_port)
    except ValueError as error:
        sys.exit(f"megatron-grpo: {error}")
    except OSError as error:
        name = f"{place.master_addr} port {place.master_port}"
        remedy = "is --master-addr the address of host 0, and this host 0 (--node-rank)?"
        if error.errno == errno.EADDRINUSE:
            remedy = "another process has the port: end it, or take another --master-port"
        sys.exit(f"megatron-grpo: {place} cannot listen at {name} ({error}): {remedy}")
    hosts, patience = range(1, place.nnodes), Patience()
    while missing := [host for host in hosts if not store.check([f"host/{host}"])]:
        who = f"{len(missing)} of {place.nnodes} hosts"
        which = f"host {', '.join(map(str, missing))}, counted from 0; their logs may say why"
        at = f"{place.master_addr}:{store.port} on {socket.gethostname()}"
        patience.wait(f"{place} waits for {who}: {which}", f"{who} did not connect to {at}", which)
    return store


def connect_to_first(place: HostPlace) -> socket.socket:
    """A connection of a further host to the port of the store, once the first host serves it.

    Its end shows that the first host's launcher has ended.
    """
    address, patience = f"{place.master_addr}:{place.master_port}", Patience()
    while True:
        try:
            # Not by torch's store, which prints a stack in C++ for each attempt. This looks it
            # up each time: DNS may still have the address from before a restart.
            first = socket.create_connection((place.master_addr, place.master_port), 5.0)
        except OSError as error:
            failed = f"{place} did not reach the first of the {place.nnodes} at {address}"
            patience.wait(f"{place} waits for the first at {address}: {error}", failed, str(error))
        else:
            first.settimeout(None)
            return first


class Patience:
    """A wait for other hosts, which is printed once, and is given up in the end."""

    def __init__(self) -> None:
        self._start, self._is_silent = running_time(), True

    def wait(self, waits: str, failed: str, reason: str) -> None:
        """Wait a moment. Prints `waits` after SILENT_SECONDS; exits after RENDEZVOUS_SECONDS."""
        if running_time() > self._start + RENDEZVOUS_SECONDS:
            line = f"megatron-grpo: {failed} within {RENDEZVOUS_SECONDS} s: {reason}"
            print(line, file=sys.stderr)
            # Nothing has failed, and the hosts may be there at the next start, such as nodes of a
            # cloud that are still starting.
            sys.exit(EXIT_PREEMPTED)
        if self._is_silent and running_time() > self._start + SILENT_SECONDS:
            self._is_silent = False
            print(f"megatron-grpo: {waits}", file=sys.stderr)
        time.sleep(POLL_SECONDS)


class HostFailed(Exception):
    """This host cannot do its part of a run, or another host cannot; (exit code, message)."""


class Hosts:
    """The launchers of all hosts, which publish texts by key for each other.

    A thread asks the store: on a network that is down it blocks, and would delay signals.
    """

    def __init__(self, place: HostPlace, digest: str = "") -> None:
        """Meet the other launchers. HostFailed if one has another `digest` of the job, or the same
        number as this one."""
        self._first: socket.socket | None = None
        if place.node_rank == 0:
            self._store = serve_first(place)
            address = str(self._store.host)
        else:
            self._first = connect_to_first(place)
            self._store = TCPStore(self._first.getpeername()[0], place.master_port)
            address = str(self._first.getsockname()[0])
        own = f"{place.local_addr or address} {digest} {secrets.token_hex(4)}"
        if self._store.compare_set(f"host/{place.node_rank}", "", own).decode() != own:
            raise HostFailed(2, f"another host has --node-rank {place.node_rank}, too")
        keys = [f"host/{rank}" for rank in range(place.nnodes)]
        patience, others = Patience(), f"{place.nnodes} hosts"
        while not self._store.check(keys):
            patience.wait(f"{place} waits for all {others}", f"not all {others} came", str(place))
        found = [text.decode().split(" ") for text in self._store.multi_get(keys)]
        self.addresses = [each[0] for each in found]
        """Addresses of the hosts, by rank."""
        if odd := [rank for rank, each in enumerate(found) if each[1] != found[0][1]]:
            time.sleep(WATCH_SECONDS)  # the store lives until the others have seen it, too
            raise HostFailed(
                2,
                f"host {odd[0]} ({self.addresses[odd[0]]}) has other arguments, or another "
                "number of GPUs, than host 0: start the same command on all hosts",
            )
        self.seen: dict[str, str] = {}
        """Published texts of the keys in `watched`."""
        self.watched: set[str] = {FAILED, PREEMPTED}
        self._has_first_ended = False
        self._answered = running_time()
        """When the store last answered."""
        self._unpublished: dict[str, str] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the first host's launcher has ended, or its host is lost."""
        return self._has_first_ended or running_time() > self._answered + RENDEZVOUS_SECONDS

    @property
    def failed_code(self) -> int | None:
        """Exit code of the first host that has failed."""
        return int(self.seen[FAILED].split(" ", 1)[0]) if FAILED in self.seen else None

    def publish(self, key: str, text: str) -> None:
        """Publish the first text of a key, soon."""
        self._unpublished[key] = text

    def check(self) -> None:
        """Raise HostFailed if another host has failed, or the first host's launcher has ended."""
        if code := self.failed_code:
            raise HostFailed(code, self.seen[FAILED].split(" ", 1)[1])
        if self.is_over:
            raise HostFailed(1, "the first host has ended: its log says why")

    def close(self) -> None:
        """End the thread: an error of the store after Python has begun to exit aborts it."""
        self._is_closed.set()
        self._thread.join(CLOSE_SECONDS)

    def _watch(self) -> None:
        with suppress(DistError):
            while not (self._first and _is_closed(self._first)):
                for key in [*self._unpublished]:
                    self._store.compare_set(key, "", self._unpublished.pop(key))
                for key in [*self.watched - self.seen.keys()]:
                    if self._store.check([key]):
                        self.seen[key] = self._store.get(key).decode()
                self._answered = running_time()
                if self._is_closed.wait(WATCH_SECONDS):
                    return
        self._has_first_ended = True


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)  # the store sends nothing by itself
    except BlockingIOError:
        return False
    except OSError:
        return True
