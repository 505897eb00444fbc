"""Seeds of samples."""

from megatron_grpo.rollout.samples import first_seed


def test_seeds_of_different_samples_never_meet():
    firsts = [first_seed(s, step, p) for s in range(3) for step in range(50) for p in range(64)]
    seeds = {first + sample for first in firsts for sample in range(64)}
    assert len(seeds) == len(firsts) * 64


def test_seeds_fit_the_engines_and_never_change():
    assert 0 <= first_seed(42, 10**6, 10**4) < 2**62
    assert first_seed(42, 0, 0) == 2770875209321528543
