"""The store through which the two ends of a channel find each other."""

import socket
import time
from datetime import timedelta
from functools import partial

import pytest

from parallel.weight_transfer.channels import ChannelError
from parallel.weight_transfer.rendezvous import join, local_address, open_rendezvous

SECOND = timedelta(seconds=1)
TIMEOUT = timedelta(seconds=60)


def test_a_rendezvous_listens_on_its_own_address_only():
    address, rendezvous = open_rendezvous("127.0.0.1")
    socket.create_connection(("127.0.0.1", address.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port), timeout=5)
    del rendezvous


def test_the_first_failure_ends_the_waits_of_all():
    address, rendezvous = open_rendezvous("127.0.0.1")
    other = join(address, TIMEOUT)
    rendezvous.check_failure()
    with pytest.raises(OSError, match="too many"), other.publishing_failures("worker 1"):
        raise OSError("too many")
    other.publish_failure("worker 2: as well")
    start = time.monotonic()
    with pytest.raises(ChannelError, match=r"^worker 1: too many$"):
        rendezvous.await_texts({"answer": "the other"}, TIMEOUT)
    assert time.monotonic() - start < 30


def test_a_lost_store_is_named():
    address, rendezvous = open_rendezvous("127.0.0.1")
    other = join(address, TIMEOUT)
    del rendezvous
    for use in (
        partial(other.await_texts, {"answer": "the other"}, TIMEOUT),
        partial(other.publish, "answer", "here"),  # not first: the host would still accept it
        partial(other.publish_failure, "no"),
        other.check_failure,
    ):
        with pytest.raises(ChannelError, match=r"^the store of the rendezvous is lost$") as failure:
            use()
        assert failure.value.__suppress_context__
    with pytest.raises(ValueError, match="ours"), other.publishing_failures("worker 1"):
        raise ValueError("ours")


def test_a_rendezvous_is_opened_on_an_address_of_this_host_only():
    with pytest.raises(OSError, match="assign requested address"):
        open_rendezvous("192.0.2.1")  # reserved for documentation


def test_a_store_that_is_gone_is_named_within_the_time_out():
    address, rendezvous = open_rendezvous("127.0.0.1")
    del rendezvous
    start = time.monotonic()
    with pytest.raises(ChannelError, match=f"no rendezvous at 127.0.0.1 port {address.port}"):
        join(address, SECOND)
    assert time.monotonic() - start < 30


def test_the_local_address_is_the_one_that_reaches_the_rendezvous():
    address, rendezvous = open_rendezvous("127.0.0.1")
    assert local_address(address) == "127.0.0.1"
    del rendezvous
