"""pass@k: the probability that at least one of k completions of a prompt passes."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c have passed.

    Equation 1 of Chen et al. 2021, "Evaluating large language models trained on code" (arXiv
    2107.03374): the share of the subsets of k samples in which at least one has passed. Computed as
    a product of k or c factors of at most 1, whichever is smaller, since binomials of hundreds
    overflow a float. Raises AssertionError unless 0 <= c <= n and 1 <= k <= n.
    """
    n, c = num_samples, num_passed
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} passed of {n}"
    # C(n - c, k) / C(n, k) = C(n - k, c) / C(n, c)
    few, many = sorted((c, k))
    failed = 1.0
    for i in range(few):
        failed *= max(n - many - i, 0) / (n - i)
    return 1.0 - failed
