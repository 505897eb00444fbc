"""How control sockets find each other, and know whether their other end is open."""

import socket
from datetime import timedelta

import pytest

from parallel.weight_transfer.channels import ControlSocket, Listener, connect

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(params=["local", "network"])
def controls(request):
    """Both ends of a connection."""
    if request.param == "local":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            first = socket.create_connection(server.getsockname())
            ends = (first, server.accept()[0])
    both = [ControlSocket(end, "the other end", timedelta(seconds=5)) for end in ends]
    yield both
    for control in both:
        control.close()


def test_is_open_whether_or_not_signals_are_unread(controls):
    first, second = controls
    first.send_signal()
    assert first.is_open() and second.is_open()
    second.await_signal()
    assert second.is_open()


@pytest.mark.parametrize("end", [0, 1])
def test_is_open_at_neither_end_once_one_is_closed_even_with_signals_unread(controls, end):
    controls[0].send_signal()
    controls[end].abort()
    assert not any(control.is_open() for control in controls)


def test_it_listens_on_its_own_address_only_and_for_one_receiver():
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


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_it_speaks_ipv6():
    waiting = Listener("::1")
    control = connect(waiting.address, "the sender", TIMEOUT)
    accepted = waiting.accept("the receiver", TIMEOUT)
    accepted.send_signal()
    control.await_signal()
    accepted.close()
    control.close()
