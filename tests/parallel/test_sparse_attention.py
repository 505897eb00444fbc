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
NONE = [0, 0]
# Two sequences continue the first one's 38 tokens, of which two are padding; a branch the third's.
PREFIXES = torch.tensor([[NONE, NONE], [[0, 38], NONE], [[0, 38], NONE], [[0, 38], [44, 61]]])
SHARING = pytest.mark.parametrize("prefixes", [None, PREFIXES], ids=["apart", "sharing"])


def seen_by_token(prefixes):
    """Tokens that each token sees, in the order of its sequence."""
    seen = []
    for number, length in enumerate(LENGTHS):
        before = [] if prefixes is None else prefixes[number].tolist()
        shared = [t for first, end in before for t in range(first, end)]
        start = int(CU_SEQLENS[number])
        seen += [[*shared, *range(start, start + own + 1)] for own in range(length)]
    return seen


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks; some have queries of two sequences."""
    monkeypatch.setattr(sparse_attention, "BLOCK", 24)
    monkeypatch.setattr(sparse_attention, "INDEX_BLOCK", 12)


def random(*size):
    return torch.randn(TOTAL, *size, dtype=torch.float64)


def chosen_by_token(query, key, weights, prefixes):
    """The set of tokens that each token attends to."""
    chosen = []
    for t, seen in enumerate(seen_by_token(prefixes)):
        score = {
            s: sum(
                w * max(float(q @ key[s]), 0.0) for q, w in zip(query[t], weights[t], strict=True)
            )
            for s in seen
        }
        # Stable: among equal scores, earlier tokens of the sequence stay first.
        chosen.append(set(sorted(score, key=lambda s: -score[s])[:TOPK]))
    return chosen


@SHARING
@pytest.mark.parametrize("size", [1, 2])
def test_every_token_attends_to_the_best_scores_up_to_itself(size, prefixes):
    torch.manual_seed(0)
    # With two heads a quarter of the scores tie at zero: earlier tokens win.
    query, key, weights = random(2, DIM), random(DIM), random(2)
    expected = chosen_by_token(query, key, weights, prefixes)
    for rank in range(size):
        own = context_indices(CU_SEQLENS, rank, size)
        queries = Queries.of(own, CU_SEQLENS, prefixes)
        found = choose_tokens(query[own], key, weights[own], queries, TOPK)
        assert [set(row) for row in found.tolist()] == [expected[t] for t in own.tolist()]
        for row, t in zip(found.tolist(), own.tolist(), strict=True):
            assert row[len(expected[t]) :] == [t] * (TOPK - len(expected[t]))  # sees fewer


@SHARING
def test_outputs_and_gradients_equal_a_softmax_over_the_chosen_tokens(prefixes):
    torch.manual_seed(0)
    query, key, value = (random(HEADS, size).requires_grad_() for size in (DIM, DIM, VALUE_DIM))
    queries = Queries.of(torch.arange(TOTAL), CU_SEQLENS, prefixes)
    upstream = random(HEADS, VALUE_DIM)
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


@SHARING
def test_a_recorded_position_is_that_token_of_the_sequence(prefixes):
    seen = seen_by_token(prefixes)
    queries = Queries.of(torch.arange(TOTAL), CU_SEQLENS, prefixes)
    recorded = torch.stack([torch.randperm(max(len(each), TOPK))[:TOPK] for each in seen]).int()
    found = recorded_tokens(recorded, queries).tolist()
    for tokens, positions, own in zip(found, recorded.tolist(), seen, strict=True):
        if len(own) > TOPK:
            assert tokens == [own[position] for position in positions]
        else:  # all that it sees, whatever is recorded
            assert tokens == own + [own[-1]] * (TOPK - len(own))


def test_blocks_take_no_keys_between_a_completion_and_its_prompt():
    queries = Queries.of(torch.arange(144, TOTAL), CU_SEQLENS, PREFIXES)
    [(_, keys)] = queries.blocks(16)
    assert keys.parts == [slice(0, 38), slice(44, 61), slice(144, TOTAL)]


def test_queries_of_a_part_have_their_ranges_on_host_and_device():
    part = Queries.of(torch.arange(TOTAL), CU_SEQLENS).part(1, 2)
    assert part.positions.tolist() == [*range(TOTAL // 2, TOTAL)]
    assert torch.equal(part.ranges, part.ranges_on_host)
