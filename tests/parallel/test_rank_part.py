import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.rank_part import context_indices, context_order

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@st.composite
def packs(draw):
    size = draw(SIZES)
    multiple = 2 * size if size > 1 else 1
    chunks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    return cumulative([n * multiple for n in chunks]), size


def test_each_rank_holds_an_early_and_a_late_chunk_of_every_sequence():
    cu_seqlens = cumulative([8, 4])
    assert context_indices(cu_seqlens, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_indices(cu_seqlens, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@given(packs())
def test_ranks_together_hold_every_position_once(pack):
    cu_seqlens, size = pack
    held = torch.cat([context_indices(cu_seqlens, rank, size) for rank in range(size)])
    assert sorted(held.tolist()) == list(range(int(cu_seqlens[-1])))


@given(packs())
def test_inverse_restores_packed_order(pack):
    cu_seqlens, size = pack
    values = torch.randn(int(cu_seqlens[-1]))
    slices = [values[context_indices(cu_seqlens, rank, size)] for rank in range(size)]
    order, inverse = context_order(cu_seqlens, size)
    assert torch.equal(torch.cat(slices), values[order])
    assert torch.equal(torch.cat(slices)[inverse], values)


@given(packs())
def test_causal_attention_costs_every_rank_the_same(pack):
    cu_seqlens, size = pack
    lengths = cu_seqlens.diff().tolist()
    keys_seen = torch.cat([torch.arange(length) + 1 for length in lengths])
    costs = {int(keys_seen[context_indices(cu_seqlens, rank, size)].sum()) for rank in range(size)}
    assert len(costs) == 1
