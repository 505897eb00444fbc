"""Seeds of samples, and the memory of a token."""

import numpy as np

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample, first_seed


def test_seeds_of_different_samples_differ():
    firsts = [first_seed(s, step, p) for s in range(3) for step in range(50) for p in range(64)]
    seeds = {first + sample for first in firsts for sample in range(64)}
    assert len(seeds) == len(firsts) * 64


def test_seeds_fit_the_engines_and_never_change():
    assert 0 <= first_seed(42, 10**6, 10**4) < 2**62
    assert first_seed(42, 0, 0) == 2770875209321528543


def test_a_token_takes_nine_bytes_of_memory_and_its_logprob_keeps_the_bits_of_the_engine():
    logprob = float(np.float32(-1 / 3))
    sample = Sample(
        prompt=Prompt(index=0, token_ids=(1,), text="", row={}),
        sample_index=0,
        completion_ids=(151_935, 7),
        logprobs=(logprob, 0.0),
        finish_reason="stop",
        text="",
        policy_version=0,
    )
    values = (sample.completion_ids, sample.logprobs, sample.loss_mask)
    assert [memoryview(of_token).itemsize for of_token in values] == [4, 4, 1]
    assert [list(of_token) for of_token in values] == [[151_935, 7], [logprob, 0.0], [1, 1]]
