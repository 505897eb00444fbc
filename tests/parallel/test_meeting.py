"""The store where both ends of a link find each other."""

import socket
import time
from datetime import timedelta

import pytest
import torch

from parallel.meeting import Meeting, join, local_address, open_meeting, place
from parallel.wire import LinkError
from processes import running

SECOND = timedelta(seconds=1)
CPU = torch.device("cpu")


def say_place(pipe):
    pipe.send(place(CPU))


def answer(pipe, meeting):
    store = join(meeting, 10 * SECOND)
    store.set("answer", store.get("question").decode() + "!")
    pipe.recv()


def test_who_has_the_invitation_reads_and_writes_the_store():
    meeting, store = open_meeting("127.0.0.1")
    with running(answer, meeting):
        store.set_timeout(10 * SECOND)
        store.set("question", "here?")
        assert store.get("answer") == b"here?!"


def test_the_store_is_reached_at_its_own_address_only():
    meeting, store = open_meeting("127.0.0.1")
    socket.create_connection(("127.0.0.1", meeting.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=5)
    del store


def test_another_key_finds_and_changes_nothing():
    meeting, store = open_meeting("127.0.0.1")
    store.set("secret", "ours")
    stranger = join(Meeting(meeting.host, meeting.port, "guess"), SECOND)
    assert not stranger.check(["secret"])
    stranger.set("secret", "theirs")
    assert store.get("secret") == b"ours"


def test_two_meetings_have_different_keys():
    (first, store), (second, other_store) = open_meeting("127.0.0.1"), open_meeting("127.0.0.1")
    assert first.key != second.key and first.port != second.port
    del store, other_store


def test_a_meeting_is_opened_on_an_address_of_this_host_only():
    with pytest.raises(OSError, match="assign requested address"):
        open_meeting("192.0.2.1")  # kept free for documentation


def test_a_store_that_is_gone_is_told_within_the_time_out():
    meeting, store = open_meeting("127.0.0.1")
    del store
    start = time.monotonic()
    with pytest.raises(LinkError, match=f"no store at 127.0.0.1 port {meeting.port}"):
        join(meeting, SECOND)
    assert time.monotonic() - start < 10


def test_the_local_address_is_the_one_that_reaches_the_meeting():
    meeting, store = open_meeting("127.0.0.1")
    assert local_address(meeting) == "127.0.0.1"
    del store


def test_processes_of_one_host_are_in_one_place():
    with running(say_place) as child:
        assert child.hear() == place(CPU)
