import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.alignment import Alignment
from parallel.packing import PackedBatch, TokenSequence, pack
from parallel.rank_part import RankPart, SecondTokens, context_indices, context_order

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


@st.composite
def responses_with_equal_beginnings(draw):
    """Responses to a few prompts, some of them masked; each may have a branch, and that another."""
    masks = st.lists(st.booleans(), max_size=5)
    sequences: list[TokenSequence] = []

    def add(beginning: list[int], mask: list[bool], root: int | None) -> None:
        # No two responses have a token in common.
        own = range(100 * len(sequences) + 10, 100 * len(sequences) + 10 + len(mask))
        sequences.append(
            TokenSequence(
                tokens=torch.tensor([*beginning, *own]),
                num_prompt_tokens=len(beginning),
                advantage=1.0,
                loss_weight=1.0,
                rollout_logprobs=torch.zeros(len(mask)),
                response_mask=torch.tensor(mask, dtype=torch.bool),
                root=root,
            )
        )

    for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        for mask in draw(st.lists(masks, min_size=1, max_size=4)):
            add([*range(1, length + 1)], mask, None)
            for _ in range(draw(st.integers(0, 2))):
                root = sequences[-1]
                cut = draw(st.integers(root.num_prompt_tokens, len(root.tokens)))
                add(root.tokens[:cut].tolist(), draw(masks), len(sequences) - 1)
    return sequences


def predicted_on(batch: PackedBatch, rank: int, num_parts: int) -> list[tuple[list[int], int, int]]:
    """(tokens that are seen, next token, second token) of the predictions of a context rank."""
    given = batch.cu_seqlens, batch.loss_mask
    local = RankPart.of(*given, rank, batch.context_size, num_parts).local
    second = SecondTokens.of(*given, local, num_parts, batch.prefixes)
    rows, tokens = second.predictions.rows, batch.tokens
    for place, part in enumerate(rows.split(second.predictions.counts)):
        assert (part // (len(local) // num_parts)).tolist() == [place] * len(part)
    found = []
    for row, position in zip(rows, second.predictions.positions, strict=True):
        last = local[row]
        number = int(torch.searchsorted(batch.cu_seqlens, last, right=True)) - 1
        parts = [] if batch.prefixes is None else batch.prefixes[number].tolist()
        parts.append((batch.cu_seqlens[number], last + 1))
        seen = torch.cat([tokens[first:end] for first, end in parts]).tolist()
        found.append((seen, int(tokens[second.next[row]]), int(tokens[position])))
    return found


@given(responses_with_equal_beginnings(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_second_tokens_of_shared_beginnings_are_those_of_every_sequence(sequences, size, num_parts):
    expected = [
        (each.tokens[: at - 1].tolist(), int(each.tokens[at - 1]), int(each.tokens[at]))
        for each in sequences
        for at in range(max(each.num_prompt_tokens, 2), len(each.tokens))
        if each.response_mask[at - each.num_prompt_tokens]
    ]
    multiple = 2 * size if size > 1 else 1
    alignment = Alignment(sequence=multiple, total=multiple * num_parts, context=size)
    for share_prompts in (False, True):
        batch = pack(sequences, range(len(sequences)), alignment, share_prompts=share_prompts)
        found = [each for rank in range(size) for each in predicted_on(batch, rank, num_parts)]
        assert sorted(found) == sorted(expected)
