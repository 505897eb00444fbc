import errno
import math
import os

import pytest
import torch
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from megatron_grpo.launch.process import is_user_error
from parallel.collectives import first_failure, on_rank_0, quantile, raise_first_failure

NUMBERS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOSPC)


def fail_on_rank_1(number: int) -> None:
    if dist.get_rank() == 1:
        raise OSError(number, os.strerror(number), "/runs/a")


def hear(rank: int) -> list[tuple[str, int | None, bool]]:
    """(message, errno, whether it is a user's error) raised here, for each errno on rank 1."""
    errors = []
    for number in NUMBERS:
        with pytest.raises(OSError) as raised:
            raise_first_failure(lambda number=number: fail_on_rank_1(number), OSError)
        errors.append((str(raised.value), raised.value.errno, is_user_error(raised.value)))
    return errors


def test_all_ranks_get_the_text_and_errno_of_a_system_error():
    rank_0, rank_1 = run_ranks(2, hear)
    assert [number for _, number, _ in rank_1] == [*NUMBERS]
    assert [text for text, *_ in rank_1] == [
        f"[Errno {number}] {os.strerror(number)}: '/runs/a'" for number in NUMBERS
    ]
    assert rank_0 == [
        (f"rank 1: {text}", number, is_for_user) for text, number, is_for_user in rank_1
    ]
    assert [is_for_user for *_, is_for_user in rank_1] == [False, False, False, True]


def raise_of_an_encoding() -> None:
    b"\xff".decode()


def raise_nothing() -> None:
    pass


@pytest.mark.usefixtures("alone")
def test_an_error_with_more_arguments_keeps_its_text():
    failure = first_failure(raise_of_an_encoding, ValueError)
    assert "can't decode byte 0xff" in str(failure)


@pytest.mark.usefixtures("alone")
def test_first_failure_is_none_without_a_failure():
    assert first_failure(raise_nothing, OSError) is None


def ask_rank_0(rank: int) -> list[object]:
    """A rank's outcome of three calls: a result, a listed error, and a subclass of a listed one."""
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
    rank_0, rank_1 = run_ranks(2, ask_rank_0)
    assert rank_0 == [1, (KeyError, "'by fire'"), (ConnectionError, "by fire")]
    assert rank_1 == [None, (KeyError, "\"'by fire'\""), (OSError, "by fire")]


SHARES = [0.0, 0.2, 0.25, 0.5, 0.731, 0.999, 1.0]


def expected_quantile(values, q):
    # In float64, since torch.quantile interpolates in the dtype of the values.
    return torch.quantile(values.double(), q).item()


PARTS = {
    "ties and negative numbers": [[-1.5, 0.0, 0.5, 0.5], [0.5, -0.25, 3e-39], [-0.0, 1e30]],
    "ranks without numbers": [[], [2.0, -1.0, 0.5], []],
    "one number": [[], [], [0.25]],
    "no number": [[], [], []],
    "many": [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (500, 3, 2000)],
}


def quantiles_on_rank(rank):
    return {
        name: [quantile(torch.as_tensor(parts[rank]), q, dist.group.WORLD) for q in SHARES]
        for name, parts in PARTS.items()
    }


def test_quantile_over_ranks_is_that_of_all_numbers():
    ranks = run_ranks(3, quantiles_on_rank)
    for name, parts in PARTS.items():
        values = torch.cat([torch.as_tensor(part) for part in parts])
        expected = (
            [expected_quantile(values, q) for q in SHARES]
            if len(values)
            else [-math.inf] * len(SHARES)
        )
        assert ranks[0][name] == pytest.approx(expected, rel=1e-12), name
        assert ranks[1][name] == ranks[0][name] == ranks[2][name]
