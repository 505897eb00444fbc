"""Sparse attention in blocks against loops over single tokens, in float64."""

import pytest
import torch
from torch.nn.functional import pad

from parallel import sparse_attention
from parallel.rank_part import context_indices
from parallel.sparse_attention import Queries, choose_tokens, recorded_tokens

LENGTHS = (40, 4, 100, 16)  # multiples of 4, for two context ranks
TOPK, HEADS, DIM, VALUE_DIM = 6, 3, 8, 5
CU_SEQLENS = pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
TOTAL = sum(LENGTHS)
FIRST = torch.repeat_interleave(CU_SEQLENS[:-1].long(), torch.tensor(LENGTHS))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks; some have queries of two sequences."""
    monkeypatch.setattr(sparse_attention, "BLOCK", 24)
    monkeypatch.setattr(sparse_attention, "INDEX_BLOCK", 12)


def random(*size):
    return torch.randn(TOTAL, *size, dtype=torch.float64)


def chosen_by_token(query, key, weights):
    """The set of tokens that each token attends to."""
    chosen = []
    for t in range(TOTAL):
        score = {
            s: sum(
                w * max(float(q @ key[s]), 0.0) for q, w in zip(query[t], weights[t], strict=True)
            )
            for s in range(int(FIRST[t]), t + 1)
        }
        chosen.append(set(sorted(score, key=lambda s: (-score[s], s))[:TOPK]))
    return chosen


def all_queries():
    return Queries.of(torch.arange(TOTAL), CU_SEQLENS)


@pytest.mark.parametrize("size", [1, 2])
def test_every_token_attends_to_the_best_scores_up_to_itself(size):
    torch.manual_seed(0)
    # With two heads a quarter of the scores tie at zero: earlier tokens win.
    query, key, weights = random(2, DIM), random(DIM), random(2)
    expected = chosen_by_token(query, key, weights)
    for rank in range(size):
        own = context_indices(CU_SEQLENS, rank, size)
        found = choose_tokens(query[own], key, weights[own], Queries.of(own, CU_SEQLENS), TOPK)
        assert [set(row) for row in found.tolist()] == [expected[t] for t in own.tolist()]
        for row, t in zip(found.tolist(), own.tolist(), strict=True):
            assert row[len(expected[t]) :] == [t] * (TOPK - len(expected[t]))  # sees fewer


def test_outputs_and_gradients_equal_a_softmax_over_the_chosen_tokens():
    torch.manual_seed(0)
    query, key, value = (random(HEADS, size).requires_grad_() for size in (DIM, DIM, VALUE_DIM))
    queries, upstream = all_queries(), random(HEADS, VALUE_DIM)
    chosen = choose_tokens(random(2, DIM), random(DIM), random(2), queries, TOPK)
    found = sparse_attention.sparse_attention(query, key, value, chosen, queries, scale=0.3)
    rows = []
    for t, tokens in enumerate(chosen.tolist()):
        seen = sorted(set(tokens))
        scores = 0.3 * torch.einsum("hd,shd->hs", query[t], key[seen])
        rows.append(torch.einsum("hs,shv->hv", scores.softmax(-1), value[seen]))
    expected = torch.stack(rows)
    inputs = [query, key, value]
    gradients = [torch.autograd.grad(each, inputs, upstream) for each in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_recorded_positions_count_from_the_start_of_each_sequence():
    queries = Queries.of(torch.tensor([0, 2, 5, 7, 10]), torch.tensor([0, 4, 12]).int())
    recorded = torch.tensor([[9, 9], [1, 2], [9, 9], [3, 0], [6, 2]]).int()
    assert recorded_tokens(recorded, queries).tolist() == [
        [0, 0],  # the first token of a sequence sees itself, whatever is recorded
        [1, 2],
        [4, 5],  # the second token of the sequence at 4
        [7, 4],
        [10, 6],
    ]


def test_queries_of_a_part_have_their_places_on_host_and_device():
    part = all_queries().part(1, 2)
    assert part.places.tolist() == [FIRST[TOTAL // 2 :].tolist(), [*range(TOTAL // 2, TOTAL)]]
    assert torch.equal(part.places, part.places_on_host)
