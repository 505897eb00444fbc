from dataclasses import replace

import pytest
import torch

from parallel import ParallelDims
from parallel.alignment import Alignment, packed_length
from parallel.packing import TokenSequence, pack


def sequence(length, num_prompt_tokens, *, first=100, advantage=1.0, loss_weight=0.5):
    return TokenSequence(
        tokens=torch.arange(first, first + length),
        num_prompt_tokens=num_prompt_tokens,
        advantage=advantage,
        loss_weight=loss_weight,
        rollout_logprobs=-torch.arange(1.0, length - num_prompt_tokens + 1),
    )


def test_a_sequence_that_starts_with_a_response_is_a_bug():
    with pytest.raises(AssertionError):
        sequence(3, 0)


def test_packed_tokens_without_padding_are_the_sequences_end_to_end():
    batch = pack([sequence(3, 1), sequence(2, 1, first=200), sequence(4, 2)], [1, 0], Alignment())
    assert batch.tokens.tolist() == [200, 201, 100, 101, 102]
    assert batch.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert batch.sequence_index.tolist() == [1, 1, 0, 0, 0]
    assert batch.loss_mask.tolist() == [False, True, False, True, True]
    assert batch.rollout_logprobs.tolist() == [0, -1, 0, -1, -2]
    assert batch.max_seqlen == 3
    assert int((batch.sequence_index >= 0).sum()) == 5


def test_positions_and_predictions_of_a_rank_are_known_before_the_copy():
    dims = ParallelDims(tensor=2, context=2)
    batch = pack([sequence(6, 2), sequence(3, 2)], [0, 1], Alignment.for_mesh(dims, True))
    batch = batch.on_rank(dims, dims.coordinates(0))
    assert batch.part.local.tolist() == [0, 1, 6, 7, 8, 11]
    predictions = batch.part.predictions
    assert (predictions.rows.tolist(), predictions.positions.tolist()) == ([1], [2])
    assert (predictions.num_rows, predictions.counts) == (6, [1, 0])
    moved = batch.to("meta")
    assert moved.part.local.is_meta and moved.part.predictions.rows.is_meta
    assert moved.on_rank(dims, dims.coordinates(0)) is moved


def test_neighbours_share_a_microbatch_that_fewer_context_ranks_split():
    dims = ParallelDims(context=4)
    batch = pack([sequence(8, 2)], [0], Alignment(sequence=4, total=4, context=2))
    held = [batch.on_rank(dims, dims.coordinates(rank)).part.local.tolist() for rank in range(4)]
    assert held == [[0, 1, 6, 7], [2, 3, 4, 5]] * 2


def test_sequences_that_context_ranks_cannot_split_are_a_bug():
    batch = pack([sequence(6, 2)], [0], Alignment(context=2))
    with pytest.raises(AssertionError, match="multiples of 2"):
        batch.on_rank(ParallelDims(context=2), ParallelDims(context=2).coordinates(0))


def test_only_response_tokens_carry_the_values_of_their_sequence():
    sequences = [
        sequence(5, 2, advantage=-1.5, loss_weight=0.25),
        sequence(3, 1, advantage=2.0, loss_weight=0.125),
    ]
    batch = pack(sequences, [0, 1], Alignment(sequence=4, total=4))
    assert batch.advantages.tolist() == [0, 0, -1.5, -1.5, -1.5, 0, 0, 0, 0, 2, 2, 0]
    assert batch.loss_weights.tolist() == [0, 0, 0.25, 0.25, 0.25, 0, 0, 0, 0, 0.125, 0.125, 0]


def test_tokens_outside_the_response_mask_are_read_and_carry_no_weight():
    mask = torch.tensor([True, False, True])
    observed = replace(sequence(5, 2, advantage=2.0, loss_weight=0.25), response_mask=mask)
    batch = pack([observed, sequence(3, 1)], [0, 1], Alignment())
    assert batch.tokens.tolist() == [100, 101, 102, 103, 104, 100, 101, 102]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, True, True]
    assert batch.loss_weights.tolist() == [0, 0, 0.25, 0, 0.25, 0, 0.5, 0.5]


def test_padding_ends_each_sequence_and_the_last_one_fills_the_microbatch():
    batch = pack([sequence(3, 1), sequence(5, 1)], [0, 1], Alignment(sequence=4, total=16))
    assert batch.cu_seqlens.tolist() == [0, 4, 16]
    assert batch.max_seqlen == 12
    assert batch.tokens[3] == 0
    assert batch.tokens[9:].tolist() == [0] * 7
    assert batch.position_ids[4:].tolist() == list(range(12))
    assert batch.sequence_index.tolist() == [0] * 3 + [-1] + [1] * 5 + [-1] * 7
    assert not batch.loss_mask[batch.sequence_index < 0].any()
    assert int((batch.sequence_index >= 0).sum()) == 8


def test_no_sequences_pack_to_the_shortest_padding_with_zero_weight():
    batch = pack([sequence(3, 1)], [], Alignment(sequence=4, total=8))
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert int((batch.sequence_index >= 0).sum()) == 0
    assert not batch.loss_mask.any()
    assert batch.loss_weights.sum() == 0


@pytest.mark.parametrize(
    "tensor, context, sequence_parallel, expected",
    [
        (1, 1, False, (1, 1)),
        (4, 1, False, (1, 1)),
        (4, 1, True, (1, 4)),
        (1, 2, False, (4, 4)),
        (4, 2, True, (4, 8)),
        (3, 2, True, (4, 12)),
    ],
)
def test_alignment_is_the_smallest_with_equal_parts_for_all_ranks(
    tensor, context, sequence_parallel, expected
):
    alignment = Alignment.for_mesh(ParallelDims(tensor=tensor, context=context), sequence_parallel)
    assert (alignment.sequence, alignment.total) == expected


@pytest.mark.parametrize("multiple", [16, 32])
@pytest.mark.parametrize("tensor", [1, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_part_has_a_multiple_of_tokens_with_fewer_context_ranks_too(multiple, tensor, size):
    dims = ParallelDims(tensor=tensor, context=4)
    alignment = Alignment.for_mesh(dims, True, multiple).for_context(size)
    assert alignment.total % (size * tensor * multiple) == 0
    assert alignment.total <= 2 * size * tensor * multiple
    sequences = [of_prompt([1] * 5, *[2] * 9), of_prompt([1] * 5, *[3] * 30)]
    for share_prompts in (False, True):
        batch = pack(sequences, [0, 1], alignment, share_prompts=share_prompts)
        assert len(batch.tokens) % (size * tensor * multiple) == 0


def of_prompt(prompt: list[int], *response: int) -> TokenSequence:
    return TokenSequence(
        tokens=torch.tensor([*prompt, *response]),
        num_prompt_tokens=len(prompt),
        advantage=2.0,
        loss_weight=0.5,
        rollout_logprobs=-torch.arange(1.0, len(response) + 1),
    )


def test_a_shared_prompt_is_packed_once_and_each_completion_begins_with_its_last_token():
    a, b = [1, 2, 3, 4], [1, 2, 3, 5]
    sequences = [of_prompt(a, 10, 11), of_prompt(b, 20), of_prompt(a, 30), of_prompt(a)]
    batch = pack(sequences, range(4), Alignment(), share_prompts=True)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 10, 11, 4, 30, 4, 1, 2, 3, 5, 20]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 3, 0, 1, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8, 9, 14]
    assert batch.prefixes.tolist() == [[[0, 0]], [[0, 3]], [[0, 3]], [[0, 3]], [[0, 0]]]
    assert batch.sequence_index.tolist() == [-1] * 3 + [0] * 3 + [2] * 2 + [3] + [1] * 5
    assert batch.completion_mask.nonzero().flatten().tolist() == [4, 5, 7, 13]
    assert batch.rollout_logprobs[4:8].tolist() == [-1, -2, 0, -1]
    assert batch.max_seqlen == 6  # positions 0 to 5
    assert packed_length(len(a), [2, 1, 0], 1) == 9


def test_a_shared_prompt_ends_before_its_padding():
    sequences = [of_prompt(list(range(1, 8)), 10), of_prompt(list(range(1, 8)), 20, 21)]
    batch = pack(sequences, [0, 1], Alignment(sequence=4, total=16), share_prompts=True)
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 16]
    assert batch.prefixes.tolist() == [[[0, 0]], [[0, 6]], [[0, 6]]]
    assert batch.position_ids.tolist() == [*range(8), *range(6, 10), *range(6, 10)]


def test_a_branch_packed_with_its_root_has_only_its_own_tokens():
    prompt = [1, 2, 3, 4]
    first, other = of_prompt(prompt, 10, 11, 12, 13), of_prompt(prompt, 20)
    branch = replace(of_prompt([*prompt, 10, 11], 30, 31), root=0)
    second_branch = replace(of_prompt([*prompt, 10, 11, 30], 40), root=2)
    sequences = [first, other, branch, second_branch]
    batch = pack(sequences, range(4), Alignment(), share_prompts=True)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 10, 11, 12, 13, 4, 20, 11, 30, 31, 30, 40]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 6, 7]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 10, 13, 15]
    none = [0, 0]
    assert batch.prefixes.tolist() == [
        [none, none, none, none],
        [[0, 3], none, none, none],
        [[0, 3], none, none, none],
        [[0, 3], [3, 5], none, none],
        [[0, 3], [3, 5], [10, 11], none],
    ]
    assert batch.completion_mask.nonzero().flatten().tolist() == [4, 5, 6, 7, 9, 11, 12, 14]
    alone = pack(sequences, [2, 3], Alignment(), share_prompts=True)  # without their root
    assert alone.tokens.tolist() == [1, 2, 3, 4, 10, 11, 30, 31, 30, 40]


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3]])
def test_a_prompt_is_not_shared_without_a_saving(prompt):
    sequences = [of_prompt(prompt, 10), of_prompt(prompt, 20)]
    alone = pack(sequences, [0, 1], Alignment(sequence=4, total=4))
    batch = pack(sequences, [0, 1], Alignment(sequence=4, total=4), share_prompts=True)
    assert torch.equal(batch.tokens, alone.tokens)
    assert not batch.prefixes.any()
    assert packed_length(len(prompt), [1, 1], 4) == len(alone.tokens)


def routed(sequence: TokenSequence, first: int) -> TokenSequence:
    """The sequence with routes over one layer with two experts: `first` + position, and 9."""
    positions = first + torch.arange(len(sequence.tokens) - 1)
    routes = torch.stack([positions, torch.full_like(positions, 9)], dim=-1).byte()
    return replace(sequence, routes=routes[:, None])


def test_routes_lie_at_their_tokens_and_other_tokens_rotate_over_experts():
    given = [routed(sequence(3, 1), 10), routed(sequence(4, 1), 20)]
    unread = replace(sequence(2, 2), routes=given[0].routes[:0])
    batch = pack([*given, unread], [1, 2, 0], Alignment(sequence=4, total=8))
    assert batch.routed_experts.dtype == torch.uint8
    assert batch.routed_experts.shape == (16, 1, 2)
    expected = [[2 * i % 23, (2 * i + 1) % 23] for i in range(16)]  # 22 is the last expert
    expected[:3] = [[20, 9], [21, 9], [22, 9]]
    expected[8:10] = [[10, 9], [11, 9]]
    assert batch.routed_experts[:, 0].tolist() == expected
    unrouted = pack([unread], [0], Alignment(sequence=4, total=4)).routed_experts
    assert unrouted[:, 0].tolist() == [[0, 1]] * 4


def test_the_last_columns_of_routes_are_chosen_tokens():
    given = [routed(sequence(3, 1), 10), routed(sequence(4, 1), 20)]
    both = [
        replace(each, routes=torch.cat([each.routes, each.routes.short() + 500], dim=2))
        for each in given
    ]
    alignment = Alignment(sequence=4, total=4)
    found, experts = (
        pack(each, [0, 1], alignment, index_topk=topk) for each, topk in ((both, 2), (given, 0))
    )
    assert found.routed_experts.tolist() == experts.routed_experts.tolist()
    tokens = found.chosen_tokens[:, 0, 0].tolist()
    assert tokens == [510, 511, 0, 0, 520, 521, 522, 0]
    as_bytes = replace(given[1], routes=given[1].routes[:, :, [0, 1, 0, 1]])
    mixed = pack([both[0], as_bytes], [1, 0], alignment, index_topk=2)
    assert mixed.chosen_tokens[:, 0, 0].tolist() == [20, 21, 22, 0, 510, 511, 0, 0]
    only = [replace(each, routes=each.routes[:, :, 2:]) for each in both]
    alone = pack(only, [0, 1], alignment, index_topk=2)
    assert alone.routed_experts is None and torch.equal(alone.chosen_tokens, found.chosen_tokens)


def test_a_shared_prompt_has_the_routes_of_one_sample_and_completions_their_own():
    prompt = [1, 2, 3, 4]
    sequences = [routed(of_prompt(prompt, 10, 11), 10), routed(of_prompt(prompt, 20, 21), 20)]
    batch = pack(sequences, [0, 1], Alignment(), share_prompts=True)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 10, 11, 4, 20, 21]
    assert batch.routed_experts[:, 0, 0].tolist() == [10, 11, 12, 13, 14, 10, 23, 24, 16]


def test_a_shared_prompt_has_the_routes_of_a_sample_with_a_read_prompt():
    failed, other = of_prompt([1, 2, 3, 4], 10, 11), routed(of_prompt([1, 2, 3, 4], 20, 21), 20)
    failed = replace(failed, routes=other.routes[:0])
    batch = pack([failed, other], [0, 1], Alignment(), share_prompts=True)
    assert batch.routed_experts[:3, 0, 0].tolist() == [20, 21, 22]


def test_routers_choose_without_routes():
    assert pack([sequence(3, 1)], [0], Alignment()).routed_experts is None
    assert pack([routed(sequence(3, 1), 0)], [], Alignment()).routed_experts is None


def test_to_moves_every_tensor():
    batch = pack([sequence(3, 1)], [0], Alignment()).to("meta")
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 9
    assert all(tensor.device.type == "meta" for tensor in tensors)
