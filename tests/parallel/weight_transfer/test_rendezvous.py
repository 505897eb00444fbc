"""The board through which the two ends of a link find each other."""

import socket
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import TCPStore

from parallel.weight_transfer.rendezvous import Meeting, join, local_address, open_meeting, place
from parallel.weight_transfer.wire import LinkError
from processes import running

SECOND = timedelta(seconds=1)
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")


def say_place(pipe):
    pipe.send(place(CPU))


def answer(pipe, meeting):
    board = join(meeting, TIMEOUT)
    (question,) = board.read({"question": "the test"}, TIMEOUT)
    board.publish("answer", question + "!")
    pipe.recv()


def test_who_has_the_invitation_reads_and_writes_the_board():
    meeting, board = open_meeting("127.0.0.1")
    with running(answer, meeting):
        board.publish("question", "here?")
        assert board.read({"answer": "the other"}, TIMEOUT) == ["here?!"]


def test_a_board_is_reached_at_its_own_address_only():
    meeting, board = open_meeting("127.0.0.1")
    socket.create_connection(("127.0.0.1", meeting.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=5)
    del board


def stranger_at(meeting):
    """The raw store, as anyone who can reach the port sees it."""
    return TCPStore(meeting.host, meeting.port, wait_for_workers=False, timeout=TIMEOUT)


def test_a_stranger_finds_the_key_nowhere():
    meeting, board = open_meeting("127.0.0.1")
    board.publish("question", "here?")
    board.refuse("no")
    stranger = stranger_at(meeting)
    names = stranger.list_keys()
    assert len(names) == 2
    for text in (*names, *(stranger.get(name).decode() for name in names)):
        assert meeting.key not in text


def test_what_a_stranger_writes_or_moves_is_not_believed():
    meeting, board = open_meeting("127.0.0.1")
    board.publish("ours", "here")
    board.publish("other", "there")
    stranger = stranger_at(meeting)
    ours, other = (
        next(name for name in stranger.list_keys() if name.endswith(end))
        for end in ("ours", "other")
    )
    for forged in ("there", "", b"\xff" * 80, stranger.get(other)):
        stranger.set(ours, forged)
        with pytest.raises(LinkError, match="'ours' at the meeting was not signed with its key"):
            board.read({"ours": "us"}, TIMEOUT)


def test_another_key_finds_and_changes_nothing():
    meeting, board = open_meeting("127.0.0.1")
    board.publish("ours", "here")
    stranger = join(Meeting(meeting.host, meeting.port, "guess"), TIMEOUT)
    with pytest.raises(LinkError, match=r"no message from us within 0\.1 s"):
        stranger.read({"ours": "us"}, SECOND / 10)
    stranger.publish("ours", "there")
    assert board.read({"ours": "us"}, TIMEOUT) == ["here"]


def test_the_first_refusal_ends_the_waits_of_all():
    meeting, board = open_meeting("127.0.0.1")
    other = join(meeting, TIMEOUT)
    board.check_refusal()
    with pytest.raises(OSError, match="too many"), other.refusing("worker 1"):
        raise OSError("too many")
    other.refuse("worker 2: as well")
    start = time.monotonic()
    with pytest.raises(LinkError, match=r"^worker 1: too many$"):
        board.read({"answer": "the other"}, TIMEOUT)
    assert time.monotonic() - start < 30


def test_a_board_that_is_lost_is_told_without_its_key():
    meeting, board = open_meeting("127.0.0.1")
    other = join(meeting, TIMEOUT)
    del board
    for use in (
        partial(other.read, {"answer": "the other"}, TIMEOUT),
        partial(other.publish, "answer", "here"),  # not first: the host would still accept it
        partial(other.refuse, "no"),
        other.check_refusal,
    ):
        with pytest.raises(LinkError, match=r"^the store of the meeting is lost$") as failure:
            use()
        assert failure.value.__suppress_context__
    with pytest.raises(ValueError, match="ours"), other.refusing("worker 1"):
        raise ValueError("ours")


def test_two_meetings_have_different_keys():
    (first, store), (second, other_store) = open_meeting("127.0.0.1"), open_meeting("127.0.0.1")
    assert first.key != second.key and first.port != second.port
    del store, other_store


def test_a_meeting_is_opened_on_an_address_of_this_host_only():
    with pytest.raises(OSError, match="assign requested address"):
        open_meeting("192.0.2.1")  # reserved for documentation


def test_a_store_that_is_gone_is_told_within_the_time_out():
    meeting, board = open_meeting("127.0.0.1")
    del board
    start = time.monotonic()
    with pytest.raises(LinkError, match=f"no meeting at 127.0.0.1 port {meeting.port}"):
        join(meeting, SECOND)
    assert time.monotonic() - start < 30


def test_the_local_address_is_the_one_that_reaches_the_meeting():
    meeting, board = open_meeting("127.0.0.1")
    assert local_address(meeting) == "127.0.0.1"
    del board


def test_processes_of_one_host_are_in_one_place():
    with running(say_place) as child:
        assert child.hear() == place(CPU)
