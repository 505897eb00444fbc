"""A control socket knows whether its other end is open."""

import socket
from datetime import timedelta

import pytest

from parallel.weight_transfer.control_socket import ControlSocket


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
