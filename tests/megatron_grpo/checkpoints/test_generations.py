"""The samples of a generation are restored bit for bit."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_grpo.batch.experience import Experience
from megatron_grpo.checkpoints.experience_file import READY, read_experience, write_experience
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Heard, Sample

NUM_SAMPLES, NUM_GENERATIONS = 12, 3
GENERATION = 3


def prompts() -> list[Prompt]:
    return [
        Prompt(index=7 * i, token_ids=tuple(range(4, 9 + i)), text=f"prompt {i}", row={"a": i})
        for i in range(NUM_SAMPLES // NUM_GENERATIONS)
    ]


def generation() -> Experience:
    """Completions of unequal lengths, with floats that have no short decimal form.

    The longer ones are dialogues, with the second and third token observed.
    """
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(
            prompt=prompts()[i // NUM_GENERATIONS],
            sample_index=i % NUM_GENERATIONS,
            completion_ids=tuple(torch.randint(4, 250, (1 + i,), generator=generator).tolist()),
            logprobs=tuple(torch.randn(1 + i, generator=generator).double().div(3).tolist()),
            finish_reason="stop" if i % 2 else "length",
            text=f"żółw \u2028 {i}\n",
            policy_version=GENERATION,
            temperature=1.3 if i == 1 else None,
            loss_mask=(True, False, False, *[True] * (i - 2)) if i >= 3 else (),
            step_rewards=((0, 0.1), (i, 1 / 3)) if i >= 3 else (),
            failure="its stderr ends with\nżółw" if i == 3 else "",
            heard=(Heard(("user",), ("add",)), Heard(("tool",), (), ("7",))) if i >= 3 else (),
        )
        for i in range(NUM_SAMPLES)
    ]
    totals = torch.randn(NUM_SAMPLES, dtype=torch.float64, generator=generator)
    return Experience(
        samples=samples,
        rewards=[{"exact": float(total), "format": 0.1} for total in totals],
        totals=totals,
        group_ids=torch.arange(NUM_SAMPLES) // NUM_GENERATIONS,
        advantages=totals / 3,
    )


def test_samples_come_back_bit_for_bit(tmp_path):
    saved = generation()
    longer = replace(prompts()[3], token_ids=(4, 5, 6), text="x", is_own=True)
    saved.samples[-1] = replace(saved.samples[-1], prompt=longer)
    advantages = [torch.randn(1 + i) for i in range(NUM_SAMPLES)]
    saved = replace(saved, token_advantages=advantages)
    assert read_experience(tmp_path, prompts(), READY) is None
    write_experience(tmp_path, saved, READY)
    read = read_experience(tmp_path, prompts(), READY)
    assert read is not None and read.samples == saved.samples and read.rewards == saved.rewards
    with pytest.raises(ValueError, match=r"has samples of the rows \[21\] of the data"):
        read_experience(tmp_path, prompts()[:-1], READY)
    for name in ("totals", "group_ids", "advantages"):
        assert torch.equal(getattr(read, name), getattr(saved, name))
    for ours, theirs in zip(read.token_advantages, advantages, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])  # experts; tokens chosen by indexers
def test_the_routes_of_tokens_come_back_and_no_advantages_are_made_up(tmp_path, dtype):
    saved, draw = generation(), np.random.default_rng(0)
    for i, sample in enumerate(saved.samples[:-1]):  # the last failed before an engine read it
        size = (len(sample.prompt.token_ids) + i, 2, 3)
        routes = draw.integers(0, np.iinfo(dtype).max, size, dtype)
        saved.samples[i] = replace(sample, routes=routes)
    write_experience(tmp_path, saved, READY)
    read = read_experience(tmp_path, prompts(), READY)
    assert read.token_advantages is None
    for ours, theirs in zip(read.samples[:-1], saved.samples[:-1], strict=True):
        assert ours.routes.dtype == dtype
        np.testing.assert_array_equal(ours.routes, theirs.routes)
    assert read.samples[-1].routes is None


def test_a_large_generation_is_written_without_a_python_object_for_each_token(tmp_path):
    """Objects cost 0.3 us of CPU time per token, during which no other thread of rank 0 runs."""
    num = 4000
    sample = replace(
        generation().samples[0],
        completion_ids=(4,) * num,
        logprobs=(0.5,) * num,
        loss_mask=(True,) * num,
    )
    large = replace(generation(), samples=[sample] * 1000, rewards=[{}] * 1000)
    times = [time.process_time()]
    for _ in range(3):
        write_experience(tmp_path, large, READY)
        times.append(time.process_time())
    assert min(end - start for start, end in pairwise(times)) / (1000 * num) < 1e-7
