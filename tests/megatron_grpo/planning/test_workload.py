"""The sequences of an optimizer step, from the lengths of others like them."""

import pytest

from megatron_grpo.planning.workload import Computed, longest_sequence, read_lengths, workload
from parallel import ParallelDims

SHARED = "grpo.shared_prompts=true"


@pytest.fixture
def work_of(job_of):
    """The workload of Llama-3.1-8B with microbatches of `room` tokens."""

    def work_of(room, lengths, *overrides, **dims):
        most = f"train.max_tokens_per_microbatch={room}"
        job = job_of("Llama-3.1-8B", most, *overrides, dims=ParallelDims(**dims))
        return workload(job.cfg, job.shape, lengths)

    return work_of


def test_workload_has_lengths_like_those_of_the_file(work_of):
    work = work_of(100, [*range(1, 33), 100], data=2)
    assert len(work.lengths) == 16  # grpo.generation_batch_size
    assert work.lengths[-1] == 100  # the longest decides what must fit
    assert sorted(work.lengths) == list(work.lengths)
    assert (work.microbatches, work.padding) == (2, 0)
    assert work.room == 2 * 2 * 100


def test_workload_pads_what_alignment_forces(work_of):
    # Each of 16 sequences fills 16 tokens: a multiple of 2 * cp; four of them a microbatch.
    work = work_of(64, [13], context=2, tensor=2)
    assert (work.microbatches, work.padding) == (4, 16 * 3)
    # Each group has 9 tokens and four times 1 + 3, all in multiples of 4; one of 28 tokens.
    groups = "grpo.num_generations=4", "data.max_prompt_length=10"
    work = work_of(64, [13], SHARED, *groups, context=2, tensor=2)
    assert work.computed.tokens == 4 * (9 + 4 * 4)
    assert work.padding == 4 * 3


def test_workload_counts_a_shared_prompt_for_each_part_of_a_group_that_fits(work_of):
    lengths, known = [2048 + 1024] * 32, "data.max_prompt_length=2048"
    groups = SHARED, "grpo.generation_batch_size=32", "grpo.num_generations=16"
    # The prompt once but for its last token, which each completion has.
    whole, halves = (work_of(room, lengths, *groups, known) for room in (20_000, 11_000))
    assert whole.filled == whole.computed.tokens == 2 * (2047 + 16 * 1025)
    assert halves.filled == halves.computed.tokens == 2 * (2 * 2047 + 16 * 1025)
    assert (whole.microbatches, halves.microbatches) == (2, 4)
    # Prompts attend to themselves, and completions to themselves and to their prompt.
    one, apart = 1024 * 2048 + 1024**2 / 2, 2048**2 / 2
    assert whole.computed.pairs == 2 * (apart + 16 * one)
    assert halves.computed.pairs == 2 * (2 * apart + 16 * one)
    for room, more in (3072, [known]), (20_000, []):  # one per microbatch; length unknown
        assert work_of(room, lengths, *groups, *more).computed == Computed.of(lengths)


def test_workload_shortens_the_prompt_of_a_short_sequences_own_group_only(work_of):
    groups = SHARED, "grpo.num_generations=4", "data.max_prompt_length=100"
    work = work_of(1024, [3, *[120] * 15], *groups, context=2)
    # Tokens that alignment to four makes too costly to share count for each completion.
    assert work.computed.tokens == 3 + 3 * 120 + 3 * (99 + 4 * 21)


def test_workload_refuses_what_does_not_fit(work_of):
    with pytest.raises(ValueError, match=r"65 tokens.*set it to 65 or more"):
        work_of(64, [5, 65])


@pytest.mark.parametrize(
    ("override", "longest"),
    [
        ("data.max_prompt_length=100", 112),  # and 12 of completion
        ("rollout.vllm.max_model_len=0.4k", 400),
        ("data.shuffle=true", 512),  # train.max_tokens_per_microbatch
    ],
)
def test_longest_sequence_is_what_the_config_allows(job_of, override, longest):
    job = job_of("Llama-3.1-8B", override, lengths=(512,))
    assert longest_sequence(job.cfg, job.shape) == longest


def test_read_lengths_names_a_mistake(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("300\n20\n\n7\n")
    assert read_lengths(file) == [7, 20, 300]
    file.write_text("300\n-4\n")
    with pytest.raises(ValueError, match=r"lengths\.txt, line 2: '-4' is not a length"):
        read_lengths(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no lengths"):
        read_lengths(file)
