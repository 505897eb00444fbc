"""The gated delta rule in chunks against the recurrence itself, token by token in float64."""

import pytest
import torch
from torch.nn.functional import normalize, pad

from parallel.delta_rule import (
    Chunks,
    causal_convolution,
    gated_delta_rule,
    last_tokens,
    run_stages,
    stages,
)

LENGTHS = (5, 130, 64, 1, 65)
"""Shorter than a chunk, longer than a chunk, and whole chunks."""
HEADS, KEY_DIM, VALUE_DIM = 3, 8, 12


def cumulative(lengths):
    return pad(torch.tensor(lengths).cumsum(0), (1, 0))


def chunks(lengths):
    return Chunks.of(lengths, torch.device("cpu"))


@pytest.fixture
def inputs():
    """Queries, keys, values, decays and strengths, [tokens, heads, ...]."""
    generator, num_tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def random(*size):
        return torch.randn(num_tokens, HEADS, *size, generator=generator, dtype=torch.float64)

    query, key = (normalize(random(KEY_DIM), dim=-1) for _ in range(2))
    rates = -2 * random().abs(), random().sigmoid()
    return [each.requires_grad_() for each in (query, key, random(VALUE_DIM), *rates)]


def by_token(query, key, value, decay, strength):
    outputs, memories = [], []
    for parts in zip(
        *(x.split(LENGTHS) for x in (query, key, value, decay, strength)), strict=True
    ):
        memory = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
        for q, k, v, g, b in zip(*parts, strict=True):
            memory = memory * g.exp()[:, None, None]
            change = b[:, None] * (v - torch.einsum("hkv,hk->hv", memory, k))
            memory = memory + k[:, :, None] * change[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", memory, q) / KEY_DIM**0.5)
        memories.append(memory)
    return torch.stack(outputs), torch.stack(memories)


def test_outputs_memories_and_gradients_equal_the_recurrence(inputs):
    found, expected = gated_delta_rule(*inputs, chunks(LENGTHS)), by_token(*inputs)
    weights = [torch.randn_like(each) for each in expected]
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, xs, strict=True)), inputs)
        for xs in (found, expected)
    ]
    for got, want in zip([*found, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_sequences_in_two_parts_equal_whole_ones(inputs):
    whole, cuts = cumulative(LENGTHS), (2, 70, 64, 1, 10)
    memory, before = None, torch.zeros(len(LENGTHS), 3, VALUE_DIM, dtype=torch.float64)
    x, weight = inputs[2][:, 0], torch.randn(VALUE_DIM, 4, dtype=torch.float64)
    read, memories = gated_delta_rule(*inputs, chunks(LENGTHS))
    mixed = causal_convolution(x, weight, whole)
    rests = [length - cut for length, cut in zip(LENGTHS, cuts, strict=True)]
    for part, lengths in enumerate((cuts, rests)):
        starts = whole[:-1] + part * torch.tensor(cuts)
        own = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts.tolist(), lengths, strict=True)]
        )
        cu_seqlens = cumulative(lengths)
        found, memory = gated_delta_rule(*(each[own] for each in inputs), chunks(lengths), memory)
        torch.testing.assert_close(found, read[own])
        torch.testing.assert_close(
            causal_convolution(x[own], weight, cu_seqlens, before), mixed[own]
        )
        before = last_tokens(x[own], cu_seqlens, before)
    torch.testing.assert_close(memory, memories)


def test_completions_and_branches_have_the_outputs_of_whole_sequences():
    """A prompt of 6 tokens with two completions, and a branch of the first at its third token."""
    cu_seqlens = cumulative((6, 5, 4, 3, 7))  # the last is a sequence of its own
    prefixes = torch.tensor(
        [[[0, 0], [0, 0]], [[0, 6], [0, 0]], [[0, 6], [0, 0]], [[0, 6], [6, 8]], [[0, 0], [0, 0]]]
    )
    paths = [range(6), range(6, 11), range(11, 15), range(15, 18), range(18, 25)]
    roots = [[], [paths[0]], [paths[0]], [paths[0], range(6, 8)], []]
    generator = torch.Generator().manual_seed(1)
    channels = HEADS * (2 * KEY_DIM + VALUE_DIM)
    x = torch.randn(25, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, 4, generator=generator, dtype=torch.float64)
    rates = torch.randn(25, HEADS, generator=generator, dtype=torch.float64).sigmoid()

    def heads(mixed):
        return mixed.unflatten(1, (HEADS, -1)).split([KEY_DIM, KEY_DIM, VALUE_DIM], dim=-1)

    def read(x, rates, stages):
        def rule(mixed, stage, memory):
            own = rates[stage.tokens]
            return gated_delta_rule(*heads(mixed), -own, own, stage.chunks, memory)

        return run_stages(x, weight, rule, stages)

    found = read(x, rates, stages(cu_seqlens, prefixes))
    for own, before in zip(paths, roots, strict=True):
        tokens = [token for path in (*before, own) for token in path]
        alone = read(x[tokens], rates[tokens], stages(cumulative([len(tokens)]), None))
        torch.testing.assert_close(found[[*own]], alone[-len(own) :])
