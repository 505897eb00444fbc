from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from megatron_grpo.evaluation.evaluation import pass_at_k


def share_of_subsets_with_a_pass(num_samples: int, num_passed: int, k: int) -> Fraction:
    """What pass@k is, by drawing every k of the samples once; the first ones have passed."""
    draws = list(combinations(range(num_samples), k))
    return Fraction(sum(any(i < num_passed for i in draw) for draw in draws), len(draws))


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_the_subsets_in_which_one_has_passed(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            exact = share_of_subsets_with_a_pass(n, c, k)
            assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-15), (n, c, k)


@pytest.mark.parametrize(
    ("n", "c", "k"),
    [(2000, 7, 900), (100_000, 3, 1), (100_000, 99_999, 2)],
)
def test_many_samples_overflow_nothing(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-10)
