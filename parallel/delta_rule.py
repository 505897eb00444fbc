"""The gated delta rule over packed sequences, in plain torch (Gated DeltaNet, arXiv 2412.06464).

A head remembers the tokens so far in a matrix S of keys by values. Token t forgets a part of it,
corrects what S has for its key k towards its value v, and reads with its query q:

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)' k_t)'        o_t = S_t' q_t / sqrt(size of a key)

with a_t = exp(decay), and a strength b_t between 0 and 1. Within a chunk of tokens all of these are
products of matrices and one triangular system (section 3.3); chunks of a sequence follow each
other.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64
"""Tokens of a chunk: the size of its triangular system."""


def sequence_positions(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of `num_tokens` packed tokens, and its position there; both int64 [T].

    `cu_seqlens` [n + 1] are cumulative lengths.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    sequences = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    return sequences, tokens - cu_seqlens[sequences]


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Mix each channel of a token with those of the tokens before it in its sequence.

    `x` [T, channels]; `weight` [channels, size of the kernel], of which the last is the token's
    own; `positions` [T] in the sequences.
    """
    mixed = x * weight[:, -1]
    for distance in range(1, weight.shape[1]):
        before = pad(x, (0, 0, distance, 0))[: len(x)]
        has_any = (positions >= distance).unsqueeze(1)
        mixed = mixed + before * has_any * weight[:, -1 - distance]
    return mixed


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """The outputs [T, heads, size of a value] of packed sequences, each of which begins with S = 0.

    `query` and `key` [T, heads, size of a key] have length 1; `value` [T, heads, size of a value];
    `decay` [T, heads] is the logarithm of what stays of S, and `strength` [T, heads]. Computed in
    their dtype; the host waits for `cu_seqlens`.
    """
    sequences, positions = sequence_positions(cu_seqlens, len(query))
    num_chunks = -(-cu_seqlens.diff() // CHUNK)  # of each sequence
    first_chunks = num_chunks.cumsum(0) - num_chunks
    slots = first_chunks[sequences] * CHUNK + positions
    total = int(num_chunks.sum())

    def chunked(x: Tensor) -> Tensor:
        """[chunks, heads, CHUNK, ...], with zeros behind the end of a sequence."""
        slotted = x.new_zeros(total * CHUNK, *x.shape[1:]).index_copy(0, slots, x)
        return slotted.unflatten(0, (total, CHUNK)).transpose(1, 2)

    query, key, value = chunked(query * query.shape[-1] ** -0.5), chunked(key), chunked(value)
    weighted = chunked(strength).unsqueeze(-1)
    # Since the beginning of the chunk: differences of two lose digits, which float64 has.
    kept = chunked(decay).double().cumsum(-1)
    between = kept.unsqueeze(-1) - kept.unsqueeze(-2)
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    between = between.masked_fill(is_later, -torch.inf).to(key.dtype).exp()
    system = weighted * (key @ key.transpose(-1, -2)) * between
    since, until = (x.to(key.dtype).exp().unsqueeze(-1) for x in (kept, kept[..., -1:] - kept))
    fresh, carried = torch.linalg.solve_triangular(
        system, weighted * torch.cat([value, key * since], -1), upper=False, unitriangular=True
    ).split([value.shape[-1], key.shape[-1]], -1)
    seen = (query @ key.transpose(-1, -2)) * between
    outputs, numbers = [], []
    memory = value.new_zeros(len(num_chunks), *key.shape[1:2], key.shape[-1], value.shape[-1])
    for number in range(int(num_chunks.max())):
        memory = memory[num_chunks[num_chunks >= number] > number]
        now = (first_chunks + number)[num_chunks > number]
        change = fresh[now] - carried[now] @ memory
        outputs.append((query[now] * since[now]) @ memory + seen[now] @ change)
        numbers.append(now)
        memory = memory * since[now][..., -1:, :]
        memory = memory + (key[now] * until[now]).transpose(-1, -2) @ change
    order = torch.cat(numbers).argsort()
    return torch.cat(outputs)[order].transpose(1, 2).flatten(0, 1)[slots]
