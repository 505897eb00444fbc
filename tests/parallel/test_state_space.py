"""Mamba-2's state space model in chunks against the recurrence itself, token by token."""

import pytest
import torch
from torch.nn.functional import pad, silu

from parallel.delta_rule import Chunks, causal_convolution, run_stages, stages
from parallel.state_space import state_space

LENGTHS = (5, 130, 64, 1, 65)
"""Shorter than a chunk, longer than a chunk, and whole chunks."""
GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 12


def cumulative(lengths):
    return pad(torch.tensor(lengths).cumsum(0), (1, 0))


def chunks(lengths):
    return Chunks.of(lengths, torch.device("cpu"))


@pytest.fixture
def inputs():
    """Queries, keys, values and decays, [tokens, ...]."""
    generator, num_tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def random(*size):
        return torch.randn(num_tokens, *size, generator=generator, dtype=torch.float64)

    query, key = (random(GROUPS, KEY_DIM) for _ in range(2))
    values = random(HEADS, VALUE_DIM), -random(HEADS).abs()
    return [each.requires_grad_() for each in (query, key, *values)]


def by_token(query, key, value, decay):
    outputs, memories = [], []
    parts = zip(*(x.split(LENGTHS) for x in (query, key, value, decay)), strict=True)
    for part in parts:
        memory = torch.zeros(GROUPS, KEY_DIM, HEADS // GROUPS, VALUE_DIM, dtype=torch.float64)
        for q, k, v, g in zip(*part, strict=True):
            v, g = (x.unflatten(0, (GROUPS, -1)) for x in (v, g))
            memory = memory * g.exp()[:, None, :, None] + torch.einsum("gk,ghv->gkhv", k, v)
            outputs.append(torch.einsum("gkhv,gk->ghv", memory, q).flatten(0, 1))
        memories.append(memory.flatten(2))
    return torch.stack(outputs), torch.stack(memories)


def test_outputs_memories_and_gradients_equal_the_recurrence(inputs):
    found, expected = state_space(*inputs, chunks(LENGTHS)), by_token(*inputs)
    weights = [torch.randn_like(each) for each in expected]
    gradients = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, xs, strict=True)), inputs)
        for xs in (found, expected)
    ]
    for got, want in zip([*found, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


def test_completions_of_a_prompt_have_the_outputs_of_whole_sequences():
    """A prompt of 70 tokens with two completions, mixed by a convolution with a bias."""
    cu_seqlens, prefixes = cumulative((70, 5, 4)), torch.tensor([[[0, 0]], [[0, 70]], [[0, 70]]])
    generator = torch.Generator().manual_seed(1)
    channels = GROUPS * 2 * KEY_DIM + HEADS * VALUE_DIM

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x, weight, bias, decay = (
        random(79, channels),
        random(channels, 4),
        random(channels),
        -random(79, HEADS).abs(),
    )

    def read(tokens, stages):
        def rule(mixed, stage, memory):
            value, key, query = mixed.split([HEADS * VALUE_DIM, *2 * [GROUPS * KEY_DIM]], dim=-1)
            query, key = (each.unflatten(1, (GROUPS, -1)) for each in (query, key))
            rates = decay[tokens][stage.tokens]
            value = value.unflatten(1, (HEADS, -1))
            return state_space(query, key, value, rates, stage.chunks, memory)

        return run_stages(x[tokens], weight, rule, stages, bias)

    found = read([*range(79)], stages(cu_seqlens, prefixes))
    for own in (range(70, 75), range(75, 79)):
        tokens = [*range(70), *own]
        alone = read(tokens, stages(cumulative([len(tokens)]), None))
        torch.testing.assert_close(found[[*own]], alone[70:])
    first = causal_convolution(x[:1], weight, cumulative([1]), bias=bias)
    torch.testing.assert_close(silu(first), silu(bias + x[:1] * weight[:, -1]))
