import pytest
import torch
import torch.distributed as dist

from helpers.ranks.processes import run_ranks
from parallel.sequences import SequenceMeans, counted_lengths

CU_SEQLENS = torch.tensor([0, 5, 6, 12, 16], dtype=torch.int32)
NUM_TOKENS = 16
# No token of the second sequence counts; the last tokens are padding.
COUNTED = [0, 1, 3, 4, 6, 7, 8, 10, 11, 12]


def case():
    generator = torch.Generator().manual_seed(0)
    values, weights = torch.randn(2, NUM_TOKENS, generator=generator, dtype=torch.float64)
    mask = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    mask[COUNTED] = True
    return values, weights, mask


def owner(world_size):
    """The rank of each token: uneven shares; the last rank has all of the last sequence."""
    ranks = torch.arange(NUM_TOKENS) * 7 % world_size
    ranks[12:] = world_size - 1
    return ranks.clamp(min=int(world_size == 4))  # with four ranks, rank 0 has no tokens


def result(values, weights, mask, group):
    """Sums, means, a loss that is nonlinear in both, and its gradient, at `mask`."""
    own, factors = values[mask].requires_grad_(), weights[mask]
    sequences = SequenceMeans(counted_lengths(CU_SEQLENS, mask.nonzero().squeeze(1)), group)
    sums, means = sequences.sum(own), sequences.mean(own)
    loss = (factors * (means.exp() + sums**2 * own)).sum()
    (gradient,) = torch.autograd.grad(loss, own)
    return [whole(x, mask) for x in (sums, means)] + [loss.detach(), whole(gradient, mask)]


def whole(values, mask):
    """Scatter the values to all packed tokens; NaN outside the mask."""
    found = torch.full((NUM_TOKENS,), float("nan"), dtype=values.dtype)
    return found.masked_scatter(mask, values.detach())


def test_one_rank_equals_the_definition():
    values, weights, mask = case()
    sums, means, loss, gradient = result(values, weights, mask, None)
    leaf, expected = values.clone().requires_grad_(), 0.0
    for start, end in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        tokens = [t for t in COUNTED if start <= t < end]
        total = sum((leaf[t] for t in tokens), torch.zeros((), dtype=torch.float64))
        mean = total / max(len(tokens), 1)
        assert sums[tokens].tolist() == pytest.approx([total.item()] * len(tokens))
        assert means[tokens].tolist() == pytest.approx([mean.item()] * len(tokens))
        for t in tokens:
            expected = expected + weights[t] * (mean.exp() + total**2 * leaf[t])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(gradient[mask], expected_gradient[mask], rtol=1e-12, atol=1e-14)


def sequence_rank(rank, world_size):
    values, weights, mask = case()
    mine = mask & (owner(world_size) == rank)
    return result(values, weights, mine, dist.group.WORLD)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_context_rank_has_the_whole_and_the_gradient_of_its_tokens(world_size):
    values, weights, mask = case()
    sums, means, loss, gradient = result(values, weights, mask, None)
    ranks = run_ranks(world_size, sequence_rank, world_size)
    assert sum(found.item() for _, _, found, _ in ranks) == pytest.approx(loss.item(), rel=1e-12)
    for rank, (found_sums, found_means, _, found) in enumerate(ranks):
        mine = mask & (owner(world_size) == rank)
        torch.testing.assert_close(found_sums[mine], sums[mine], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found_means[mine], means[mine], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[mine], gradient[mine], rtol=1e-12, atol=1e-14)
