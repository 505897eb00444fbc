"""The sequences of an optimizer step, from the lengths of others like them."""

import pytest

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.planning.workload import (
    Computed,
    Workload,
    longest_sequence,
    read_lengths,
    workload,
)
from parallel import ParallelDims


@pytest.fixture
def folder(tmp_path):
    return write_config(tmp_path, "Llama-3.1-8B")


def test_a_step_has_lengths_like_those_of_the_file(folder):
    cfg = tiny_config(folder, ParallelDims(data=2), "train.max_tokens_per_microbatch=100")
    work = workload(cfg, read_shape(folder), [*range(1, 33), 100])
    assert len(work.lengths) == 16  # grpo.generation_batch_size
    assert work.lengths[-1] == 100  # the longest decides what must fit
    assert sorted(work.lengths) == list(work.lengths)
    assert (work.microbatches, work.padding) == (2, 0)
    assert work.room == 2 * 2 * 100


def test_padding_is_what_alignment_forces(folder):
    dims = ParallelDims(context=2, tensor=2)
    cfg = tiny_config(folder, dims, "train.max_tokens_per_microbatch=64")
    work = workload(cfg, read_shape(folder), [13])
    # Each of 16 sequences fills 16 tokens: a multiple of 2 * cp; four of them a microbatch.
    assert (work.microbatches, work.padding) == (4, 16 * 3)


def test_shared_prompts_are_counted_once_for_each_part_of_a_group_that_fits(folder):
    shape, lengths = read_shape(folder), [2048 + 1024] * 32
    options = ["grpo.generation_batch_size=32", "grpo.num_generations=16"]

    def planned(room: int, *others: str) -> Workload:
        room_option = f"train.max_tokens_per_microbatch={room}"
        sharing = "grpo.shared_prompts=true", room_option
        return workload(
            tiny_config(folder, ParallelDims(), *options, *sharing, *others), shape, lengths
        )

    length = "data.max_prompt_length=2048"
    # All of the prompt but its last token, and that with each completion.
    whole, halves = planned(20_000, length), planned(11_000, length)
    assert whole.filled == whole.computed.tokens == 2 * (2047 + 16 * 1025)
    assert halves.filled == halves.computed.tokens == 2 * (2 * 2047 + 16 * 1025)
    assert (whole.microbatches, halves.microbatches) == (2, 4)
    # Prompts attend to themselves, and completions to themselves and to their prompt.
    one, apart = 1024 * 2048 + 1024**2 / 2, 2048**2 / 2
    assert whole.computed.pairs == 2 * (apart + 16 * one)
    assert halves.computed.pairs == 2 * (2 * apart + 16 * one)
    for alone in (planned(3072, length), planned(20_000)):  # one per microbatch; length unknown
        assert alone.computed == Computed.of(lengths)


def test_a_short_sequence_shortens_the_prompt_of_its_own_group_only(folder):
    cfg = tiny_config(
        folder,
        ParallelDims(context=2),
        "grpo.shared_prompts=true",
        "grpo.num_generations=4",
        "data.max_prompt_length=100",
        "train.max_tokens_per_microbatch=1024",
    )
    work = workload(cfg, read_shape(folder), [3, *[120] * 15])
    # What is not shared, as alignment to four tokens would cost more, counts for each.
    assert work.computed.tokens == 3 + 3 * 120 + 3 * (99 + 4 * 21)


def test_padding_of_shared_prompts_is_what_alignment_forces(folder):
    cfg = tiny_config(
        folder,
        ParallelDims(context=2, tensor=2),
        "grpo.shared_prompts=true",
        "grpo.num_generations=4",
        "data.max_prompt_length=10",
        "train.max_tokens_per_microbatch=64",
    )
    work = workload(cfg, read_shape(folder), [13])
    # Each group has 9 tokens and four times 1 + 3, all in multiples of 4; one of 28 tokens.
    assert work.computed.tokens == 4 * (9 + 4 * 4)
    assert work.padding == 4 * 3


def test_what_does_not_fit_is_refused_with_the_numbers(folder):
    cfg = tiny_config(folder, ParallelDims(), "train.max_tokens_per_microbatch=64")
    with pytest.raises(ValueError, match=r"65 tokens.*set it to 65 or more"):
        workload(cfg, read_shape(folder), [5, 65])


@pytest.mark.parametrize(
    ("override", "longest"),
    [
        ("data.max_prompt_length=100", 112),  # and 12 of completion
        ("rollout.vllm.max_model_len=0.4k", 400),
        ("data.shuffle=true", 512),  # train.max_tokens_per_microbatch
    ],
)
def test_the_longest_sequence_is_what_the_config_allows(folder, override, longest):
    cfg = tiny_config(folder, ParallelDims(), override)
    assert longest_sequence(cfg, read_shape(folder)) == longest


def test_a_file_of_lengths_is_read_and_a_mistake_in_it_named(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("300\n20\n\n7\n")
    assert read_lengths(file) == [7, 20, 300]
    file.write_text("300\n-4\n")
    with pytest.raises(ValueError, match=r"lengths\.txt, line 2: '-4' is not a length"):
        read_lengths(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no lengths"):
        read_lengths(file)
