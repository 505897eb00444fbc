"""Gathers the findings of all hosts of a job on rank 0, with the offsets of their clocks.

Hosts meet in a store at the launcher's address and port, as the ranks of a training run do. One
process per host sends, whatever the number of ranks.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistError, Store, rendezvous

from megatron_grpo.doctor.finding import Finding
from megatron_grpo.doctor.hosts import HostReport
from megatron_grpo.launch.launch import RankPlace

NUM_PINGS = 5
"""The fastest round trip gives the best estimate of the clock offset."""
TIMEOUT = timedelta(seconds=600)
"""Generous: on a shared file system, a first start with cold caches takes minutes per host."""


def meet(place: RankPlace) -> Store:
    """The store shared by all ranks of the job. Raises ValueError if not all of them join."""
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=TIMEOUT))
    except DistError as error:
        raise ValueError(
            f"the {place.world_size} ranks did not meet at MASTER_ADDR and MASTER_PORT in "
            f"{TIMEOUT.seconds} s: is the first host's name right and the port open? {error}"
        ) from None
    return store


def gather(
    store: Store,
    place: RankPlace,
    findings: Sequence[Finding],
    now: Callable[[], float] = time.time,
) -> list[HostReport]:
    """Gather every host's findings and clock offset on rank 0; other ranks get an empty list.

    Rank 0 handles one host after the other, in a few milliseconds each.
    """
    if place.rank == 0:
        others = [_receive(store, ticket, now) for ticket in range(1, place.num_hosts)]
        return [HostReport(socket.gethostname(), tuple(findings)), *others]
    if place.local_rank == 0:
        _send(store, findings, now)
    return []


def _send(store: Store, findings: Sequence[Finding], now: Callable[[], float]) -> None:
    ticket = store.add("doctor/tickets", 1)
    table = [asdict(finding) for finding in findings]
    store.set(f"doctor/{ticket}/findings", json.dumps([socket.gethostname(), table]))
    samples = []
    for ping in range(NUM_PINGS):
        sent = now()
        store.set(f"doctor/{ticket}/ping/{ping}", "")
        there = float(store.get(f"doctor/{ticket}/pong/{ping}"))
        back = now()
        samples.append(((back - sent) / 2, (sent + back) / 2 - there))
    store.set(f"doctor/{ticket}/clock", json.dumps(min(samples)))


def _receive(store: Store, ticket: int, now: Callable[[], float]) -> HostReport:
    host, table = json.loads(store.get(f"doctor/{ticket}/findings"))
    for ping in range(NUM_PINGS):
        store.wait([f"doctor/{ticket}/ping/{ping}"])
        store.set(f"doctor/{ticket}/pong/{ping}", repr(now()))
    uncertainty, ahead = json.loads(store.get(f"doctor/{ticket}/clock"))
    return HostReport(host, tuple(Finding(**row) for row in table), ahead, uncertainty)
