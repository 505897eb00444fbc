"""Channels over the network listen only where they should, and buffers do not mix."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from parallel.weight_transfer.control_socket import Listener, connect
from parallel.weight_transfer.network_channels import NetworkChannel

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


def test_what_is_filled_while_the_last_is_on_its_way_does_not_mix_with_it():
    """The buffers are far larger than what the sockets hold, so that sending takes a while."""
    size = 32 << 20
    waiting = Listener("127.0.0.1")
    control = connect(waiting.address, "the sender", TIMEOUT)
    sender = NetworkChannel(waiting.accept("the receiver", TIMEOUT), size, CPU, is_sender=True)
    receiver = NetworkChannel(control, size, CPU, is_sender=False)

    def send():
        for number in range(4):
            sender.next_buffer().fill_(number)
            sender.send_bucket(size)
        sender.flush()

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(send)
        for number, data in enumerate(receiver.receive_buckets([size] * 4)):
            assert (data == number).all()
        sending.result(timeout=20)
    sender.close()
    receiver.close()
