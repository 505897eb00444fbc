"""The gated delta rule over packed sequences, in plain torch (Gated DeltaNet, arXiv 2412.06464).

The memory of a head is a matrix S [keys, values]. Token t lets it decay, corrects the value that S
returns for its key k towards its value v, and reads S with its query q:

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)' k_t)'      o_t = S_t' q_t / sqrt(size of a key)

with a_t = exp(decay), and a strength b_t between 0 and 1. Within a chunk of tokens these are
products of matrices, and one triangular system (section 3.3); chunks follow each other.

A short causal convolution first mixes queries, keys and values of neighbouring tokens.
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
    """Sequence of each packed token, and its position there; both int64 [`num_tokens`].

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
    """Convolve each channel within its sequence: y_t = bias + sum over d of weight[-1 - d] x_(t-d).

    `x` [T, channels]; `weight` [channels, kernel size]; `before` [n, kernel size - 1, channels] are
    the tokens before each sequence, None: zeros; `bias` [channels].
    """
    sequences, positions = sequence_positions(cu_seqlens, len(x))
    own = weight[:, -1]
    mixed = x * own if bias is None else torch.addcmul(bias, x, own)
    for distance in range(1, weight.shape[1]):
        shifted = pad(x, (0, 0, distance, 0))[: len(x)]
        outside = x.new_zeros(())
        if before is not None:
            # Negative indices count from the end of `before`; clamped ones are not used below.
            outside = before[sequences, (positions - distance).clamp(max=-1)]
        is_inside = (positions >= distance).unsqueeze(1)
        mixed = mixed + torch.where(is_inside, shifted, outside) * weight[:, -1 - distance]
    return mixed


def last_tokens(x: Tensor, cu_seqlens: Tensor, before: Tensor) -> Tensor:
    """Last tokens [n, kernel size - 1, channels] of each sequence: `before` of the next run.

    A sequence shorter than that takes the rest from its own `before`.
    """
    number = torch.arange(-before.shape[1], 0, device=x.device)
    ends, lengths = cu_seqlens[1:].unsqueeze(1), cu_seqlens.diff().unsqueeze(1)
    own = x[(ends + number).clamp(min=0)]
    earlier = before.gather(
        1, (lengths + number).clamp(max=-1)[..., None].expand_as(before) + before.shape[1]
    )
    return torch.where((lengths + number >= 0).unsqueeze(-1), own, earlier)


def unit_heads(heads: Tensor) -> Tensor:
    """Scale queries or keys to length 1; 1e-6 is under the root, as in all implementations."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Chunks:
    """Packed sequences cut into chunks of at most `LARGEST_CHUNK` tokens.

    Step i takes chunk i of every sequence that has one, the sequences with most chunks first: each
    step's sequences are the first ones of the step before.
    """

    size: int
    """Tokens of a chunk; the last of a sequence may have fewer."""
    slots: Tensor
    """[T] slot of each token in all chunks, end to end."""
    order: Tensor
    """[chunks] chunks in the order of steps."""
    steps: Sequence[int]
    """The number of chunks of each step."""
    sequences: Tensor
    """[n] sequences, those with most chunks first."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Chunks":
        """Cut sequences of `lengths`; the host waits for the copies to `device`."""
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
        """Lay [T, heads, ...] out as [chunks, heads, size, ...], zeros after ends of sequences."""
        slotted = x.new_zeros(len(self.order) * self.size, *x.shape[1:])
        slotted = slotted.index_put((self.slots,), x)  # index_copy would keep `x` for the backward
        # Contiguous: otherwise each product of matrices would copy it for its backward.
        return slotted.unflatten(0, (-1, self.size)).transpose(1, 2).contiguous()

    def by_step(self, x: Tensor) -> Sequence[Tensor]:
        """Split `x` [chunks, ...] into the chunks of each step."""
        return x.index_select(0, self.order).split(self.steps)


def decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of a memory that survive: from an earlier to a later token of a chunk [..., later,
    earlier], from the chunk's start to each token, and from each to its end [..., size, 1].

    `decay` [..., size] is the logarithm of the share that survives each token.
    """
    # float64, because differences of two long sums lose digits.
    kept = decay.double().cumsum(-1)
    between = kept.unsqueeze(-1) - kept.unsqueeze(-2)
    is_later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
    # Masked before exp: above the diagonal the differences are positive and could overflow.
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
    """Outputs [T, heads, value size] of packed sequences, and S after each sequence.

    `query` and `key` [T, heads, key size] have length 1; `value` [T, heads, value size]; `decay`
    (log a) and `strength` (b) [T, heads]. `memory` [n, heads, key size, value size] is S before
    each sequence, None: 0. Computed in the dtype of the arguments.
    """
    if memory is None:
        memory = value.new_zeros(len(chunks.sequences), *key.shape[1:], value.shape[-1])
    chunked = chunks.of_tokens
    query, key, value = chunked(query * query.shape[-1] ** -0.5), chunked(key), chunked(value)
    weighted = chunked(strength).unsqueeze(-1)
    between, since, until = decays(chunked(decay))
    # The corrections u_t = b_t (v_t - a_t S_(t-1)' k_t) of a chunk depend on each other: with rows
    # b, (I + L) U = b V - b (K since) S, where L is b K K' between, strictly lower. Solved for both
    # right-hand sides before S is known: U = fresh - carried S. The solver reads no diagonal.
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
    for new, recalled, far, near, stays, added in by_step:
        # Sequences that have ended are the last ones, see `Chunks`.
        memory, end = memory.split([len(new), len(memory) - len(new)])
        change = new - recalled @ memory
        outputs.append(far @ memory + near @ change)
        memory = memory * stays + added.transpose(-1, -2) @ change
        ended.append(end)
    # Outputs are in the order of steps. Shorter sequences ended earlier, and are sorted later.
    in_order = torch.cat(outputs)[chunks.order.argsort()]
    memories = torch.cat([memory, *reversed(ended)])[chunks.sequences.argsort()]
    return in_order.transpose(1, 2).flatten(0, 1)[chunks.slots], memories


@dataclass(frozen=True)
class Stage:
    """Runs of packed tokens that begin sequences or continue runs of earlier stages."""

    tokens: Tensor | slice
    """Packed positions of the tokens, run by run."""
    lengths: Sequence[int]
    """Tokens of each run."""
    cu_seqlens: Tensor
    """Cumulative lengths of the runs."""
    follows: Tensor | None
    """Number of the run that each continues, over all stages; None: the runs begin sequences."""
    is_followed: bool
    """Whether a later stage continues these runs and needs their memories."""

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the runs, for rules in plain torch."""
        return Chunks.of(self.lengths, self.cu_seqlens.device)

    @cached_property
    def host_cu_seqlens(self) -> Tensor:
        """`cu_seqlens` on the host, made without a copy from the device."""
        return torch.tensor([*accumulate(self.lengths, initial=0)])


def stages(cu_seqlens: Tensor, prefixes: Tensor | None) -> list[Stage]:
    """Cut the segments of a `PackedBatch` into runs; a run continues at most one other.

    `cu_seqlens` and `prefixes` as in the batch, None without shared prompts; the host waits for
    both.
    """
    if prefixes is None:
        lengths = cu_seqlens.diff().tolist()
        return [Stage(slice(None), lengths, cu_seqlens, None, is_followed=False)]
    bounds = cu_seqlens.tolist()
    parts = [[end for start, end in each if end > start] for each in prefixes.tolist()]
    # Start of a segment -> end of the last part that it continues.
    continued = {start: ends[-1] for start, ends in zip(bounds, parts, strict=False) if ends}
    # A segment is cut where another one branches off: only ends of runs leave a memory.
    runs = [*pairwise(sorted({*bounds, *continued.values()}))]
    depths: dict[int, int] = {}  # end of a run -> number of runs before it in its sequence
    for start, end in runs:
        # A run within a segment continues the run that ends where it starts; -1: begins a sequence.
        before = continued.get(start, -1 if start in bounds else start)
        depths[end] = depths[before] + 1 if before >= 0 else 0
    found: list[Stage] = []
    numbers: dict[int, int] = {}  # end of a run -> number of the run, over all stages
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
"""Rule of a layer: (tokens of a stage after the convolution [t, channels], stage, memories before
its runs) -> (outputs of the tokens, memories after the runs; None is allowed without followers)."""


def activated_convolution(
    x: Tensor, weight: Tensor, stage: Stage, before: Tensor, bias: Tensor | None
) -> Tensor:
    """`causal_convolution` of the runs of a stage, then SiLU."""
    return silu(causal_convolution(x, weight, stage.cu_seqlens, before, bias))


def run_stages(
    x: Tensor,
    weight: Tensor,
    rule: Rule,
    stages: list[Stage],
    bias: Tensor | None = None,
    convolution: Convolution = activated_convolution,
) -> Tensor:
    """Convolve `x` [T, channels] and apply `rule`, stage by stage; returns the outputs [T, ...]. A
    run starts from the memory and the last tokens of the run that it continues."""
    # By run number: memories, and last tokens for the convolution of the run that follows.
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
