"""Channels and their control sockets, inside a host and over the network."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from helpers.ranks.processes import running
from parallel.weight_transfer.channels import (
    ChannelError,
    ControlSocket,
    Listener,
    _kernel_address,
    _proof,
    _socket_for,
    connect,
)
from parallel.weight_transfer.connect import open_channel

BUCKET = 1 << 20
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
SOON = 30
"""In seconds: less than the time-out, more than a busy machine needs."""


def listener(kind):
    return Listener(None if kind == "local" else "127.0.0.1")


def outgoing(waiting, timeout=TIMEOUT, bucket=BUCKET):
    control = waiting.accept("the receiver", timeout)
    return open_channel(control, bucket, CPU, is_sender=True)


def incoming(address, bucket=BUCKET):
    return open_channel(connect(address, "the sender", TIMEOUT), bucket, CPU, is_sender=False)


@pytest.fixture(params=["local", "network"])
def kind(request):
    return request.param


@contextmanager
def both_ends(kind, bucket=BUCKET):
    """The two ends of a channel, in this process."""
    waiting = listener(kind)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(outgoing, waiting, bucket=bucket)
        second = pool.submit(incoming, waiting.address, bucket)
        sender, receiver = first.result(), second.result()
    yield sender, receiver
    sender.close()
    receiver.close()


def send(sender, messages):
    for data in messages:
        sender.next_buffer()[: len(data)] = data
        sender.send_bucket(len(data))
    sender.flush()


def receive(receiver, sizes):
    return [data.clone() for data in receiver.receive_buckets(sizes)]


def send_from_process(pipe, kind, pushes):
    """Send each push, a list of messages, then hang."""
    waiting = listener(kind)
    pipe.send(waiting.address)
    sender = outgoing(waiting)
    for messages in pushes:
        send(sender, messages)
    pipe.send("sent")
    pipe.recv()


def receive_and_hang(pipe, address):
    """Take one of three messages, then hang."""
    receiver = incoming(address)
    arrivals = receiver.receive_buckets([BUCKET, BUCKET, BUCKET])
    next(arrivals)
    pipe.send("one")
    pipe.recv()


def test_messages_arrive_in_order_in_push_after_push(kind):
    pushes = [
        [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        for sizes in ([BUCKET, 7, BUCKET - 1, 1, 12345], [], [3], [BUCKET] * 4)
    ]
    with running(send_from_process, kind, pushes) as child:
        receiver = incoming(child.hear())
        for messages in pushes:
            arrived = receive(receiver, [len(data) for data in messages])
            assert all(map(torch.equal, arrived, messages)) and len(arrived) == len(messages)
        assert child.hear() == "sent"
        receiver.close()


@pytest.mark.parametrize("bucket", [BUCKET, 32 << 20], ids=["small", "more than sockets hold"])
def test_a_sender_is_two_buffers_ahead_at_most(kind, bucket):
    with both_ends(kind, bucket) as (sender, receiver), ThreadPoolExecutor() as pool:
        data = torch.arange(5, dtype=torch.uint8)[:, None].expand(5, bucket)
        sending = pool.submit(send, sender, data)
        arrivals = receiver.receive_buckets([bucket] * 5)
        for number in range(5):
            buffer = next(arrivals)
            time.sleep(0.05)  # a sender that does not wait would overwrite the buffer
            assert (buffer == number).all() and not sending.done()
        assert next(arrivals, None) is None
        sending.result(timeout=SOON)


def test_flush_waits_until_the_receiver_is_done_with_everything(kind):
    with both_ends(kind) as (sender, receiver), ThreadPoolExecutor() as pool:
        sending = pool.submit(send, sender, [torch.ones(10, dtype=torch.uint8)])
        arrivals = receiver.receive_buckets([10])
        next(arrivals)
        time.sleep(0.2)
        assert not sending.done()
        assert next(arrivals, None) is None
        sending.result(timeout=SOON)


def test_a_sender_that_is_killed_is_named_at_once(kind):
    with running(send_from_process, kind, [[]]) as child:
        receiver = incoming(child.hear())
        receive(receiver, [])
        assert child.hear() == "sent"
        threading.Timer(0.3, child.kill).start()
        start = time.monotonic()
        with pytest.raises(ChannelError, match="the sender has closed the channel or died"):
            receive(receiver, [BUCKET])
        assert time.monotonic() - start < SOON
        receiver.close()


def test_a_receiver_that_is_killed_is_named_at_once(kind):
    waiting = listener(kind)
    with running(receive_and_hang, waiting.address) as child:
        sender = outgoing(waiting)
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(send, sender, torch.zeros(3, BUCKET, dtype=torch.uint8))
            assert child.hear() == "one"
            child.kill()
            with pytest.raises(ChannelError, match="the receiver has closed the channel or died"):
                sending.result(timeout=SOON)
        sender.close()


def test_a_mute_end_is_waited_for_until_the_time_out(kind):
    with both_ends(kind) as (sender, receiver):
        for end in (sender, receiver):
            end._control.seconds = 0.3
            end._control.socket.settimeout(0.3)
        start = time.monotonic()
        with pytest.raises(ChannelError, match=r"the sender has made no progress for 0\.3 s"):
            receive(receiver, [1])
        with pytest.raises(ChannelError, match=r"the receiver has made no progress for 0\.3 s"):
            send(sender, [torch.zeros(1, dtype=torch.uint8)])
        assert time.monotonic() - start < SOON


@pytest.mark.parametrize("waits", ["sender", "receiver"])
@pytest.mark.parametrize("aborts", ["sender", "receiver"])
def test_an_aborted_channel_ends_the_waits_of_both_ends(kind, waits, aborts):
    with both_ends(kind) as (sender, receiver), ThreadPoolExecutor() as pool:
        calls = {
            "sender": (send, sender, torch.zeros(30, BUCKET, dtype=torch.uint8)),
            "receiver": (receive, receiver, [BUCKET] * 30),
        }
        waiting = pool.submit(*calls.pop(waits))
        time.sleep(0.2)
        assert not waiting.done()
        (sender if aborts == "sender" else receiver).abort()
        with pytest.raises(ChannelError, match="has closed the channel"):
            waiting.result(timeout=SOON)
        ((late, *args),) = calls.values()
        with pytest.raises(ChannelError, match="has closed the channel"):
            late(*args)


def test_a_receiver_that_does_not_come_is_waited_for_until_the_time_out(kind):
    with pytest.raises(ChannelError, match=r"the receiver did not connect within 0\.3 s"):
        outgoing(listener(kind), timedelta(seconds=0.3))


def test_a_sender_that_stopped_listening_is_named(kind):
    address = listener(kind).address
    with pytest.raises(ChannelError, match="cannot connect to the sender"):
        incoming(address)


# Control sockets


@pytest.fixture
def controls(kind):
    """Both ends of a connection."""
    if kind == "local":
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


def test_channel_listens_on_its_own_address_for_one_receiver():
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


def test_listener_waits_for_its_receiver_whatever_strangers_do_before(kind):
    waiting = Listener(None if kind == "local" else "127.0.0.1", "secret")
    silent, reset, garbage = (connect_as_stranger(waiting.address) for _ in range(3))
    garbage.sendall(b"GET / HTTP/1.1" + bytes(18))
    reset.close()
    elsewhere = Listener("127.0.0.1", "secret")
    relayed = connect_as_stranger(waiting.address)
    relayed.sendall(_proof("secret", elsewhere.address))
    guessing = connect(waiting.address, "the sender", TIMEOUT, "guess")
    control = connect(waiting.address, "the sender", TIMEOUT, "secret")
    with waiting.accept("the receiver", TIMEOUT).socket as accepted:
        assert silent.recv(1) == garbage.recv(1) == relayed.recv(1) == b""
        with pytest.raises(ChannelError):
            guessing.await_signal()
        accepted.sendall(b"1")
        control.await_signal()
    elsewhere.close()


def connect_as_stranger(address):
    stranger = _socket_for(address)
    stranger.connect(_kernel_address(address))
    return stranger


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_channel_takes_ipv6_addresses():
    waiting = Listener("::1")
    control = connect(waiting.address, "the sender", TIMEOUT)
    accepted = waiting.accept("the receiver", TIMEOUT)
    accepted.send_signal()
    control.await_signal()
    accepted.close()
    control.close()
