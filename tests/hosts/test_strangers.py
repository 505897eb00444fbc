"""Strangers in the network of a run: what they can do is in docs/security.md."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from helpers.runs.host_runs import start
from helpers.runs.hosts import Host, can_make_hosts
from helpers.runs.jobs import assert_same_run
from helpers.runs.sabotage import InCall, slowly
from megatron_grpo.watchdog.connections import encode_line
from megatron_grpo.watchdog.watchdog import STORE_KEY
from parallel.weight_transfer.rendezvous import Rendezvous

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root"),
    pytest.mark.timeout(300),
]

GARBAGE = b"GET / HTTP/1.1\r\n\r\n"
CLAIM = encode_line(rank=1, host="stranger", pid=1, proof="")


def outside(*hosts: Host) -> set[tuple[str, int]]:
    """Addresses and ports at which others reach these hosts."""
    places = {place for host in hosts for place in host.listeners()}
    return {(address, port) for address, port in places if not address.startswith("127.")}


class Stranger:
    """Calls ports from a host outside of the job; connections stay open to the end."""

    def __init__(self, host: Host) -> None:
        network = [os.pidfd_open(host.init), os.CLONE_NEWNET]
        self._threads = ThreadPoolExecutor(2, initializer=os.setns, initargs=network)
        self._known: set[tuple[str, int]] = set()
        self.calls: list[socket.socket] = []

    def call_new_ports(self, hosts: list[Host], *messages: bytes) -> None:
        """Send each message to each port that has begun to listen, over a connection of its own."""
        for place in outside(*hosts) - self._known:
            self._known.add(place)
            for message in messages:
                self.run(self.call, place, message)

    def call(self, place: tuple[str, int], message: bytes) -> socket.socket:
        with suppress(ConnectionError):  # it listens no more
            self.calls.append(socket.create_connection(place, timeout=10))
            self.calls[-1].sendall(message)
        return self.calls[-1]

    def claim_rank(self, host: str, port: int) -> tuple[socket.socket, TCPStore]:
        """Read the watchdog's address in the job's store, and be the first rank 1 there."""
        store = TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.set("of a stranger", "text")
        address = json.loads(store.get(STORE_KEY))
        return self.call((address["host"], address["port"]), CLAIM), store

    def run(self, function, *arguments):
        return self._threads.submit(function, *arguments)

    def hang_up(self) -> None:
        self._threads.shutdown()
        for call in self.calls:
            call.close()


@pytest.fixture
def stranger(hosts):
    stranger = Stranger(hosts[2])
    yield stranger
    stranger.hang_up()


def hesitate(rank: int) -> None:
    """Have this rank be the second everywhere: at the watchdog, and at weight channels."""
    InCall(slowly, 1, "megatron_grpo.watchdog.watchdog", "connect")(rank)
    publish = Rendezvous.publish

    def publish_late(self: Rendezvous, key: str, text: str) -> None:
        if key.startswith("channel/"):
            time.sleep(0.5)
        publish(self, key, text)

    Rendezvous.publish = publish_late


def test_a_stranger_who_is_first_at_every_port_gets_nothing(
    hosts, given, one_host, stranger, tmp_path
):
    with start(given, tmp_path / "run", hosts[:2], axes=["data"], sabotage=hesitate) as job:
        claim = stranger.run(stranger.claim_rank, hosts[0].address, job.port)
        while job.is_running:
            stranger.call_new_ports([*hosts[:2], hosts[-1]], b"", GARBAGE, CLAIM)
        ended = job.end(10)
    assert ended.exit_codes == [0, 0], ended.output
    assert "is repeated" not in ended.output
    assert_same_run(tmp_path / "run", one_host("data"))
    refused, _ = claim.result()
    assert refused.recv(1) == b""
    heard = set()
    for call in stranger.calls:
        call.settimeout(0.2)
        with suppress(ConnectionError, TimeoutError):
            heard.add(call.recv(1000)[:12])
    assert heard == {b"", b"HTTP/1.1 401", b"HTTP/1.1 400"}


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def test_a_stranger_who_takes_the_place_of_a_rank_in_gloo_ends_the_run_with_an_error(
    hosts, given, stranger, tmp_path
):
    """Gloo knows a rank by the small number that it says first, and by nothing else."""
    run_dir, is_taken = tmp_path / "run", tmp_path / "taken"
    late = InCall(partial(await_file, is_taken), 1, "torch.distributed", "init_process_group")
    with start(given, run_dir, hosts[:2], axes=["data"], sabotage=late) as job:
        # The store, the watchdog, and gloo.
        job.wait_for(lambda: len(outside(hosts[0])) > 2, 60)
        stranger.call_new_ports(hosts[:1], *(number.to_bytes(8, "little") for number in range(2)))
        time.sleep(0.5)
        is_taken.touch()
        job.wait_for(lambda: outside(hosts[1]), 60)
        time.sleep(0.5)
        stranger.hang_up()
        ended = job.end(30)
    assert ended.exit_codes == [1, 1], ended.output
    assert "rank 0 on alpha" in ended.output and "gloo/transport/tcp" in ended.output
    assert not (run_dir / "metrics.jsonl").exists()
