import errno
import os

import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_grpo.launch.process import is_user_error
from parallel.collectives import first_failure, on_rank_0, raise_first_failure

NUMBERS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOSPC)


def fail_on_rank_1(number: int) -> None:
    if dist.get_rank() == 1:
        raise OSError(number, os.strerror(number), "/runs/a")


def hear(rank: int) -> list[tuple[str, int | None, bool]]:
    """For each errno of a failure on rank 1, the error raised here and whether it is a mistake."""
    told = []
    for number in NUMBERS:
        with pytest.raises(OSError) as raised:
            raise_first_failure(lambda number=number: fail_on_rank_1(number), OSError)
        told.append((str(raised.value), raised.value.errno, is_user_error(raised.value)))
    return told


def test_all_ranks_are_told_the_text_and_the_number_of_an_error_of_the_system():
    of_0, of_1 = run_ranks(2, hear)
    assert [number for _, number, _ in of_1] == [*NUMBERS]
    assert [text for text, *_ in of_1] == [
        f"[Errno {number}] {os.strerror(number)}: '/runs/a'" for number in NUMBERS
    ]
    assert of_0 == [(f"rank 1: {text}", number, is_for_user) for text, number, is_for_user in of_1]


def test_what_passes_does_so_for_all_ranks():
    for told in run_ranks(2, hear):
        assert [is_for_user for *_, is_for_user in told] == [False, False, False, True]


def raise_of_an_encoding() -> None:
    b"\xff".decode()


def raise_nothing() -> None:
    pass


@pytest.mark.usefixtures("alone")
def test_an_error_that_takes_more_than_a_text_is_told_by_it():
    failure = first_failure(raise_of_an_encoding, ValueError)
    assert "can't decode byte 0xff" in str(failure)


@pytest.mark.usefixtures("alone")
def test_where_nothing_fails_nothing_is_told():
    assert first_failure(raise_nothing, OSError) is None


def ask_rank_0(rank: int) -> list[object]:
    """What a rank gets of three calls: a result, an error for all, and a subclass of one."""
    zero = ["zero"] if rank == 0 else None
    found: list[object] = [on_rank_0(zero, len, (OSError,))]
    for kind in (KeyError, ConnectionError):
        with pytest.raises((KeyError, OSError)) as raised:
            on_rank_0(zero, lambda _, kind=kind: fail_as(kind), (KeyError, OSError))
        found.append((type(raised.value), str(raised.value)))
    return found


def fail_as(kind: type[Exception]) -> None:
    raise kind("by fire")


def test_rank_0_returns_to_itself_and_raises_on_all():
    of_0, of_1 = run_ranks(2, ask_rank_0)
    assert of_0 == [1, (KeyError, "'by fire'"), (ConnectionError, "by fire")]
    assert of_1 == [None, (KeyError, "\"'by fire'\""), (OSError, "by fire")]
