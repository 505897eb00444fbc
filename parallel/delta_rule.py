"""The gated delta rule over packed sequences, in plain torch (Gated DeltaNet, arXiv 2412.06464).

A head remembers the tokens so far in a matrix S of keys by values. Token t forgets a part of it,
corrects what S has for its key k towards its value v, and reads with its query q:

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)' k_t)'      o_t = S_t' q_t / sqrt(size of a key)

with a_t = exp(decay), and a strength b_t between 0 and 1. Within a chunk of tokens these are
products of matrices, and one triangular system (section 3.3); chunks follow each other.

Before it, a short convolution mixes the queries, keys and values of each token with those of a few
tokens before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

LARGEST_CHUNK = 64
"""Most tokens of a chunk: the size of its triangular system."""


def sequence_positions(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of `num_tokens` packed tokens, and its position there; both int64 [T].

    `cu_seqlens` [n + 1] are cumulative lengths.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    sequences = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    return sequences, tokens - cu_seqlens[sequences]


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    before: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Mix each channel of a token with those of the tokens before it in its sequence.

    `x` [T, channels]; `weight` [channels, size of the kernel], of which the last is the token's
    own; `before` [n, size of the kernel - 1, channels] has tokens before each sequence, else zeros;
    `bias` [channels].
    """
    sequences, positions = sequence_positions(cu_seqlens, len(x))
    own = weight[:, -1]
    mixed = x * own if bias is None else torch.addcmul(bias, x, own)
    for distance in range(1, weight.shape[1]):
        shifted = pad(x, (0, 0, distance, 0))[: len(x)]
        outside = x.new_zeros(())
        if before is not None:
            outside = before[sequences, (positions - distance).clamp(max=-1)]
        is_inside = (positions >= distance).unsqueeze(1)
        mixed = mixed + torch.where(is_inside, shifted, outside) * weight[:, -1 - distance]
    return mixed


def last_tokens(x: Tensor, cu_seqlens: Tensor, before: Tensor) -> Tensor:
    """Last tokens of each sequence: `before` of the tokens that follow these."""
    number = torch.arange(-before.shape[1], 0, device=x.device)
    ends, lengths = cu_seqlens[1:].unsqueeze(1), cu_seqlens.diff().unsqueeze(1)
    own = x[(ends + number).clamp(min=0)]
    earlier = before.gather(
        1, (lengths + number).clamp(max=-1)[..., None].expand_as(before) + before.shape[1]
    )
    return torch.where((lengths + number >= 0).unsqueeze(-1), own, earlier)


def unit_heads(heads: Tensor) -> Tensor:
    """Queries or keys of length 1; 1e-6 is under the root, as in all implementations."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Chunks:
    """Packed sequences cut into chunks of at most `LARGEST_CHUNK` tokens.

    A step takes the next chunk of every sequence that has one, of those with most chunks first: the
    sequences of a step are the first ones of the step before.
    """

    size: int
    """Tokens of a chunk; the last of a sequence may have fewer."""
    slots: Tensor
    """[T] the place of each token among those of all chunks, which follow each other."""
    order: Tensor
    """[chunks] all chunks in the order of steps."""
    steps: Sequence[int]
    """The number of chunks of each step."""
    sequences: Tensor
    """[n] the sequences, those with most chunks first."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Chunks":
        """Cut sequences of `lengths` on `device`, for which the host waits."""
        size = min(LARGEST_CHUNK, 1 << (max(lengths) - 1).bit_length())
        counts = [-(-length // size) for length in lengths]
        firsts = [*accumulate(counts, initial=0)]
        slots = [torch.arange(n) + f * size for f, n in zip(firsts, lengths, strict=False)]
        sequences = sorted(range(len(counts)), key=lambda i: -counts[i])
        steps = [[i for i in sequences if counts[i] > step] for step in range(max(counts))]
        order = [firsts[i] + step for step, own in enumerate(steps) for i in own]
        return cls(
            size,
            torch.cat(slots).to(device),
            torch.tensor(order, device=device),
            [len(own) for own in steps],
            torch.tensor(sequences, device=device),
        )

    def of_tokens(self, x: Tensor) -> Tensor:
        """[chunks, heads, size, ...] of [T, heads, ...], with zeros behind ends of sequences."""
        slotted = x.new_zeros(len(self.order) * self.size, *x.shape[1:])
        slotted = slotted.index_put((self.slots,), x)  # which keeps no `x`, as index_copy does
        # Contiguous, as products of matrices would copy it for their backward each time.
        return slotted.unflatten(0, (-1, self.size)).transpose(1, 2).contiguous()

    def by_step(self, x: Tensor) -> Sequence[Tensor]:
        """The parts of `x` [chunks, ...], one for each step."""
        return x.index_select(0, self.order).split(self.steps)


def decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of a memory that stay between two tokens of a chunk [..., later, earlier], 0 for later
    ones; since the beginning of the chunk, and until its end [..., size, 1]. `decay` [..., size] is
    the logarithm of the share that stays at each token."""
    # Differences of two sums lose digits, which float64 has.
    kept = decay.double().cumsum(-1)
    between = kept.unsqueeze(-1) - kept.unsqueeze(-2)
    is_later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
    between = between.masked_fill(is_later, -torch.inf).to(decay.dtype).exp()
    since, until = (x.to(decay.dtype).exp().unsqueeze(-1) for x in (kept, kept[..., -1:] - kept))
    return between, since, until


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    chunks: Chunks,
    memory: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs [T, heads, size of a value] of packed sequences, and S after each of them.

    `query` and `key` [T, heads, size of a key] have length 1; `value` [T, heads, size of a value];
    `decay` [T, heads] is the logarithm of what stays of S, and `strength` [T, heads]. `memory`
    [n, heads, size of a key, size of a value] is S before each sequence, else 0. Computed in their
    dtype.
    """
    if memory is None:
        memory = value.new_zeros(len(chunks.sequences), *key.shape[1:], value.shape[-1])
    chunked = chunks.of_tokens
    query, key, value = chunked(query * query.shape[-1] ** -0.5), chunked(key), chunked(value)
    weighted = chunked(strength).unsqueeze(-1)
    between, since, until = decays(chunked(decay))
    fresh, carried = torch.linalg.solve_triangular(
        weighted * (key @ key.transpose(-1, -2)) * between,
        weighted * torch.cat([value, key * since], -1),
        upper=False,
        unitriangular=True,
    ).split([value.shape[-1], key.shape[-1]], -1)
    seen = (query @ key.transpose(-1, -2)) * between
    by_chunk = (fresh, carried, query * since, seen, since[..., -1:, :], key * until)
    outputs, ended, memory = [], [], memory[chunks.sequences]
    by_step = zip(*(chunks.by_step(x) for x in by_chunk), strict=True)
    for new, recalled, asked, near, stays, added in by_step:
        memory, end = memory.split([len(new), len(memory) - len(new)])
        change = new - recalled @ memory
        outputs.append(asked @ memory + near @ change)
        memory = memory * stays + added.transpose(-1, -2) @ change
        ended.append(end)
    in_order = torch.cat(outputs)[chunks.order.argsort()]
    memories = torch.cat([memory, *reversed(ended)])[chunks.sequences.argsort()]
    return in_order.transpose(1, 2).flatten(0, 1)[chunks.slots], memories


@dataclass(frozen=True)
class Stage:
    """Runs of packed tokens that begin sequences, or follow runs of earlier stages."""

    tokens: Tensor | slice
    """Packed positions of the tokens of one run after the other."""
    lengths: Sequence[int]
    """Tokens of each run."""
    cu_seqlens: Tensor
    """Cumulative lengths of the runs."""
    follows: Tensor | None
    """The number of the run before each, counted over all stages; None: the runs begin sequences.
    """
    is_followed: bool
    """By a stage with runs that need the memories after these."""

    @cached_property
    def chunks(self) -> Chunks:
        """For the rules in torch."""
        return Chunks.of(self.lengths, self.cu_seqlens.device)

    @cached_property
    def host_cu_seqlens(self) -> Tensor:
        """The cumulative lengths once more, on the host."""
        return torch.tensor([*accumulate(self.lengths, initial=0)])


def stages(cu_seqlens: Tensor, prefixes: Tensor | None) -> list[Stage]:
    """The segments of a `PackedBatch` as runs, each of which follows at most one other.

    `prefixes` [n, most parts, 2] are those of the batch, None without shared prompts. The host
    waits for both.
    """
    if prefixes is None:
        lengths = cu_seqlens.diff().tolist()
        return [Stage(slice(None), lengths, cu_seqlens, None, is_followed=False)]
    bounds = cu_seqlens.tolist()
    parts = [[end for start, end in each if end > start] for each in prefixes.tolist()]
    continued = {start: ends[-1] for start, ends in zip(bounds, parts, strict=False) if ends}
    runs = [*pairwise(sorted({*bounds, *continued.values()}))]
    depths: dict[int, int] = {}  # of a run, by its end
    for start, end in runs:
        before = continued.get(start, -1 if start in bounds else start)
        depths[end] = depths[before] + 1 if before >= 0 else 0
    found: list[Stage] = []
    numbers: dict[int, int] = {}  # of a run, by its end
    deepest = max(depths.values())
    for depth in range(deepest + 1):
        own = [(start, end) for start, end in runs if depths[end] == depth]
        follows = [numbers[continued.get(start, start)] for start, _ in own] if depth else None
        for _, end in own:
            numbers[end] = len(numbers)
        lengths, device = [end - start for start, end in own], cu_seqlens.device
        found.append(
            Stage(
                torch.cat([torch.arange(*run) for run in own]).to(device),
                lengths,
                torch.tensor([*accumulate(lengths, initial=0)], device=device),
                None if follows is None else torch.tensor(follows, device=device),
                is_followed=depth < deepest,
            )
        )
    return found


Convolution = Callable[[Tensor, Tensor, Stage, Tensor, Tensor | None], Tensor]
"""Arguments and result of `activated_convolution`."""
Rule = Callable[[Tensor, Stage, Tensor | None], tuple[Tensor, Tensor | None]]
"""Rule of a layer: (outputs of the convolution for the tokens of a stage [t, channels], stage,
memories before its runs) -> (readings of the tokens, memories after the runs, which only followed
ones must have)."""


def activated_convolution(
    x: Tensor, weight: Tensor, stage: Stage, before: Tensor, bias: Tensor | None
) -> Tensor:
    """`causal_convolution` of the runs of a stage, and the activation after it."""
    return silu(causal_convolution(x, weight, stage.cu_seqlens, before, bias))


def read_memories(
    x: Tensor,
    weight: Tensor,
    rule: Rule,
    stages: list[Stage],
    bias: Tensor | None = None,
    convolution: Convolution = activated_convolution,
) -> Tensor:
    """The outputs of a rule, such as `gated_delta_rule`, after the `convolution` of `x`
    [T, channels] by `weight`, with `bias` if it has any."""
    outputs, memories, lasts = [], x.new_zeros(0), x.new_zeros(0)
    for stage in stages:
        own, memory = x[stage.tokens], None
        before = x.new_zeros(len(stage.cu_seqlens) - 1, weight.shape[1] - 1, x.shape[1])
        if stage.follows is not None:
            before, memory = lasts[stage.follows], memories[stage.follows]
        read, memory = rule(convolution(own, weight, stage, before, bias), stage, memory)
        outputs.append(read)
        if not stage.is_followed:
            continue
        assert memory is not None
        last = last_tokens(own, stage.cu_seqlens, before)
        if stage.follows is None:
            memories, lasts = memory, last
        else:
            memories, lasts = torch.cat([memories, memory]), torch.cat([lasts, last])
    if len(stages) == 1:
        return outputs[0]
    positions = torch.arange(len(x), device=x.device)
    order = torch.cat([positions[stage.tokens] for stage in stages]).argsort()
    return torch.cat(outputs)[order]
