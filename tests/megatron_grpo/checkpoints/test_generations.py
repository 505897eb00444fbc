"""The generation in training is restored bit for bit, including its log-probabilities."""

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.models import tiny_model
from helpers.policies import start_policy, tiny_config
from helpers.ranks import run_ranks
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import Preparation, add_logprobs
from megatron_grpo.batch.token_values import with_cached_values
from megatron_grpo.checkpoints.experience_file import READY, read_experience, write_experience
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Heard, Sample
from megatron_grpo.policy.reference import build_reference
from parallel import ParallelDims
from parallel.microbatches import CostModel

NUM_SAMPLES, NUM_GENERATIONS = 12, 3
GRPO = (
    f"grpo.generation_batch_size={NUM_SAMPLES}",
    f"grpo.num_generations={NUM_GENERATIONS}",
    "grpo.steps_per_generation=2",
    "train.max_tokens_per_microbatch=32",
)
GENERATION = 3


def prompts() -> list[Prompt]:
    return [
        Prompt(index=7 * i, token_ids=tuple(range(4, 9 + i)), text=f"prompt {i}", row={"a": i})
        for i in range(NUM_SAMPLES // NUM_GENERATIONS)
    ]


def generation() -> Experience:
    """Completions of unequal lengths, in floating-point numbers that have no short decimal form.

    The longer ones are dialogues, in which the second and third token were observed.
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
            loss_mask=(True, False, False, *[True] * (i - 2)) if i >= 3 else (),
            step_rewards=((0, 0.1), (i, 1 / 3)) if i >= 3 else (),
            heard=(Heard(("user",), ("add",)), Heard(("tool",), ())) if i >= 3 else (),
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


def logprobs_on_rank(
    rank: int, folder: Path, other: Path, dims: ParallelDims, out: Path, *overrides: str
) -> list[list[torch.Tensor]]:
    """Old and reference log-probabilities [T] of this rank's microbatches: computed, and after a
    resume. The reference is the model in `other`."""
    options = (*GRPO, *overrides)
    cfg = tiny_config(folder, dims, *options)
    policy, groups = start_policy(rank, folder, dims, *options)
    reference = build_reference(tiny_config(other, dims, *options), policy.shape, groups)
    cost, device = CostModel.transformer(64), torch.device("cpu")
    preparation = Preparation(policy, reference, cost, cfg, groups, device)

    def minibatches(experience: Experience | None) -> list[list]:
        return [
            add_logprobs(batches, policy, reference, cfg, groups, is_next=False)
            for batches in preparation.packed(experience, GENERATION)
        ]

    experience = generation() if rank == 0 else None
    first = minibatches(experience)
    known = with_cached_values(experience, first, GENERATION, cfg, groups)
    assert (known is None) == (rank != 0)
    resumed = None
    if known:
        write_experience(out, known)
        resumed = read_experience(out, prompts())
        assert resumed is not None
    for parameter in [*policy.parameters().values(), *reference.parameters().values()]:
        parameter.data.zero_()  # the policy that generated is gone, the reference of that time too
    second = minibatches(resumed)
    if not policy.is_last_stage:  # which makes none, and is not asked for any
        return []
    return [
        [
            logprobs
            for batches in microbatches
            for batch in batches
            for logprobs in (batch.old_logprobs, batch.ref_logprobs)
        ]
        for microbatches in (first, second)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("dims", "overrides"),
    [
        (ParallelDims(pipeline=2, data=2), []),
        (ParallelDims(tensor=2, context=2), []),
        (ParallelDims(context=2), ["grpo.shared_prompts=true"]),
        (ParallelDims(context=4), ["parallel.dynamic_context_parallel=true"]),
    ],
    ids=str,
)
def test_logprobs_of_all_ranks_survive_the_models_that_made_them(tmp_path, dims, overrides):
    folder, other = (tiny_model(tmp_path / f"model_{i}", "qwen3", seed=i) for i in range(2))
    results = run_ranks(
        dims.world_size, logprobs_on_rank, folder, other, dims, tmp_path, *overrides
    )
    with_logprobs = [result for result in results if result]
    assert len(with_logprobs) == dims.stage_size
    for computed, resumed in with_logprobs:
        assert len(computed) >= 2
        for values in (computed[::2], computed[1::2]):
            assert any(each.count_nonzero() for each in values)
        assert not torch.equal(computed[0], computed[1])
        for before, after in zip(computed, resumed, strict=True):
            assert torch.equal(before, after)


def test_samples_come_back_bit_for_bit(tmp_path):
    saved = generation()
    longer = replace(prompts()[3], token_ids=(4, 5, 6), text="x", is_own=True)
    saved.samples[-1] = replace(saved.samples[-1], prompt=longer)
    old, ref = ([torch.randn(1 + i) for i in range(NUM_SAMPLES)] for _ in range(2))
    saved = replace(saved, old_logprobs=old, ref_logprobs=ref)
    assert read_experience(tmp_path, prompts()) is None
    write_experience(tmp_path, saved)
    read = read_experience(tmp_path, prompts())
    assert read is not None and read.samples == saved.samples and read.rewards == saved.rewards
    with pytest.raises(ValueError, match=r"was training on the rows \[21\] of the data"):
        read_experience(tmp_path, prompts()[:-1])
    for name in ("totals", "group_ids", "advantages"):
        assert torch.equal(getattr(read, name), getattr(saved, name))
    for ours, theirs in zip(read.old_logprobs + read.ref_logprobs, old + ref, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])  # the latter of chosen tokens
def test_the_routes_of_tokens_come_back_and_no_reference_is_made_up(tmp_path, dtype):
    saved = replace(generation(), old_logprobs=[torch.zeros(0)] * NUM_SAMPLES)
    draw = np.random.default_rng(0)
    for i, sample in enumerate(saved.samples[:-1]):  # the last failed before an engine read it
        size = (len(sample.prompt.token_ids) + i, 2, 3)
        routes = draw.integers(0, np.iinfo(dtype).max, size, dtype)
        saved.samples[i] = replace(sample, routes=routes)
    write_experience(tmp_path, saved, READY)
    read = read_experience(tmp_path, prompts(), READY)
    assert read.ref_logprobs is None
    for ours, theirs in zip(read.samples[:-1], saved.samples[:-1], strict=True):
        assert ours.routes.dtype == dtype
        np.testing.assert_array_equal(ours.routes, theirs.routes)
    assert read.samples[-1].routes is None


def test_a_large_generation_is_written_without_a_python_object_for_each_token(tmp_path):
    """They take 0.3 us of CPU time per token, during which no other thread of rank 0 runs."""
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
