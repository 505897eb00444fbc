"""How the KL of minibatches is assigned to the samples whose rewards are compared."""

import torch

from megatron_grpo.batch.prepare import by_sample
from megatron_grpo.batch.schedule import BatchSchedule


def test_what_minibatches_found_goes_to_the_samples_that_they_were_dealt():
    batches = BatchSchedule(num_generations=4, generation_batch_size=8, steps_per_generation=2)
    indices = batches.minibatches(generation=0, seed=42)
    assert indices == [[0, 1, 3, 4], [2, 5, 6, 7]]
    kl = torch.arange(8, dtype=torch.float64)
    assert torch.equal(by_sample([kl[places] for places in indices], indices), kl)
