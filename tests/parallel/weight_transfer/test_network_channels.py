"""Channels over the network listen only where they should, and buffers do not mix."""

import socket
from datetime import timedelta

import pytest
import torch

from parallel.weight_transfer.control_socket import Listener, connect

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


def test_a_channel_listens_on_its_own_address_only_and_for_one_receiver():
    waiting = Listener("127.0.0.1")
    host, port = waiting.address
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    control = connect(waiting.address, "the sender", TIMEOUT)
    accepted = waiting.accept("the receiver", TIMEOUT)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)
    accepted.close()
    control.close()


def test_a_channel_speaks_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    waiting = Listener("::1")
    control = connect(waiting.address, "the sender", TIMEOUT)
    accepted = waiting.accept("the receiver", TIMEOUT)
    accepted.send_signal()
    control.await_signal()
    accepted.close()
    control.close()
