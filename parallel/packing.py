"""Padding-free batches: sequences laid end to end, padded only where parallelism requires it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from parallel.alignment import Alignment, is_shared, round_up
from parallel.dims import Coordinates, ParallelDims
from parallel.images import Images, PackedImages, PromptImages
from parallel.rank_part import RankPart


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One prompt with one completion, and its inputs to the loss.

    `advantage` is one value for all response tokens, or one per token. `loss_weight` is the weight
    of each response token, normalized over the global batch: the loss is not divided later.
    `rollout_logprobs` are the engine's log-probabilities of the response tokens. Tokens outside
    `response_mask`, such as an environment's replies between turns, are context only: they do not
    enter the loss.
    """

    tokens: Tensor  # [L] int64 or int32
    num_prompt_tokens: int
    advantage: float | Tensor  # [L - num_prompt_tokens]
    loss_weight: float
    rollout_logprobs: Tensor  # [L - num_prompt_tokens]
    response_mask: Tensor | None = None  # [L - num_prompt_tokens] bool, counted tokens; None: all
    # [up to L, layers, columns] uint8, int16 or int32: the engine's choices for the first tokens
    # (all but the last, which it sampled and did not read). Columns: experts, then token positions
    # from indexers; either may be absent. None: the model chooses
    routes: Tensor | None = None
    log_row: int | None = None  # row of the first response token in the token log; None: no log
    root: int | None = None  # index of the sequence in whose response this prompt ends; None: none
    temperature: float | None = None  # of the sampler; None: the run's, in all sequences
    images: Images | None = None  # images of the sequence; None: none

    def __post_init__(self) -> None:
        # Nothing predicts the first token of a sequence, so it cannot be a response token.
        assert 1 <= self.num_prompt_tokens <= len(self.tokens)
        assert len(self.rollout_logprobs) == len(self.tokens) - self.num_prompt_tokens


Sequences = Sequence[TokenSequence] | Mapping[int, TokenSequence]
"""Sequences by their index in the optimizer batch: all of them, or some."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One microbatch: n segments end to end, T tokens with alignment padding after each segment.

    A segment is a whole sequence or, where completions share their prompt, either the prompt
    without its last token, or that last token followed by one completion. What sequences share may
    also extend into a completion. So each token is predicted at the position before it in its own
    segment; only attention looks across segments.

    Every tensor is indexed like `tokens`: position t describes ``tokens[t]``. Every rank of a model
    replica holds the complete batch, and `part` selects the rank's own positions. Padding has
    sequence_index -1 and zeros elsewhere.
    """

    tokens: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, within the sequence; continued through padding
    cu_seqlens: Tensor  # [n + 1] int32, cumulative segment lengths, padding included
    max_seqlen: int  # longest sequence, padding and shared prompt included
    context_size: int = 1  # neighbours on the context axis that split the microbatch
    sequence_index: Tensor  # [T] int64, index in the optimizer batch; -1: shared by several
    completion_mask: Tensor  # [T] bool, tokens of completions
    loss_mask: Tensor  # [T] bool, completion tokens that count: sampled, and not masked
    loss_weights: Tensor  # [T]
    advantages: Tensor  # [T]
    rollout_logprobs: Tensor  # [T]
    temperatures: Tensor | None = None  # [T], of the sampler; None: the run's
    old_logprobs: Tensor | None = None  # [T], under the generating policy; None: the current one
    ref_logprobs: Tensor | None = None  # [T]
    high_entropy: Tensor | None = None  # [T], entropies of the objective's tokens, -inf of others
    entropy_weights: Tensor | None = None  # [T], weights in the entropy bonus; None: no bonus
    log_rows: Tensor | None = None  # [T] int64, rows in the token log; -1 or None: not logged
    # [T, layers, topk] integers, experts of each token; None: the routers choose. A training rank
    # keeps only its own layers.
    routed_experts: Tensor | None = None
    # [T, layers, index_topk], in-sequence positions of the tokens that each token attends to;
    # None: indexers choose. With `part`, only the rank's own tokens.
    chosen_tokens: Tensor | None = None
    # [n, most parts, 2] int64, packed ranges [first, end) that each segment attends to in addition
    # to itself: a shared prompt and shared beginnings of responses, without padding, or (0, 0) for
    # none. Each range begins a segment. None: prompts are never shared.
    prefixes: Tensor | None = None
    images: PackedImages | None = None  # None: no prompt has any
    part: RankPart | None = None  # positions and predictions of one rank; None: not known yet

    @property
    def rope_positions(self) -> Tensor:
        """Positions for RoPE: [T], or with images [3, T]."""
        return self.position_ids if self.images is None else self.images.positions

    def temperature_at(self, positions: Tensor, default: float) -> float | Tensor:
        """Temperatures of the tokens at `positions`: the run's, `default`, or one for each."""
        return default if self.temperatures is None else self.temperatures[positions]

    def on_rank(self, dims: ParallelDims, coordinates: Coordinates) -> "PackedBatch":
        """The batch with the `part` of the rank at `coordinates`, unless it is known.

        Call it before `to`: on a GPU, the host would wait for the number of tokens.
        """
        if self.part is not None:
            return self
        rank = coordinates.context % self.context_size
        part = RankPart.of(self.cu_seqlens, self.loss_mask, rank, self.context_size, dims.tensor)
        chosen = self.chosen_tokens
        return replace(
            self, part=part, chosen_tokens=None if chosen is None else chosen[part.local]
        )

    def to(self, device: torch.device | str) -> "PackedBatch":
        """A copy with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor | RankPart | PackedImages)
        }
        return replace(self, **moved)


class ColumnMap:
    """Columns [total] of a microbatch, with values at ascending `places` and a filler in the gaps.

    For places 0:2 and 4:7 of 8 tokens, `column([3, 5])` is 3 3 0 0 5 5 5 0.
    """

    def __init__(self, places: Sequence[slice], total: int) -> None:
        self._places, self._total = places, total
        bounds = [bound for place in places for bound in (place.start, place.stop)]
        self._lengths = np.diff([0, *bounds, total])
        """Gap, place, gap, place, ..., gap: above 0 2 2 3 1."""

    def column(
        self,
        values: Sequence[float | Tensor],
        dtype: DTypeLike = np.float32,
        elsewhere: int = 0,
    ) -> Tensor:
        """Fill each place with its value, a scalar or one per token; gaps with `elsewhere`."""
        if Tensor not in map(type, values):  # the usual case
            in_turn = np.full(len(self._lengths), elsewhere, dtype)
            in_turn[1::2] = values
            # Faster than a write to the slice of each place.
            return torch.from_numpy(np.repeat(in_turn, self._lengths))
        column = np.full(self._total, elsewhere, dtype)
        for value, place in zip(values, self._places, strict=True):
            column[place] = value
        return torch.from_numpy(column)


def pack(
    sequences: Sequences,
    indices: Sequence[int],
    alignment: Alignment,
    *,
    share_prompts: bool = False,
    index_topk: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """Pack ``sequences[i] for i in indices`` end to end.

    With `share_prompts`, sequences with equal prompts share a copy of it if that saves tokens, and
    a sequence packed with its `root` continues the root's segment. `indices` may be empty: a rank
    without work joins its peers' collectives with padding, at zero loss. The last `index_topk`
    columns of `routes` are token positions. `dtype` is for weights, advantages and so on.
    """
    segments = _segments(sequences, indices, alignment, share_prompts)
    lengths = [round_up(len(s.tokens), alignment.sequence) for s in segments] or [alignment.total]
    # The last segment takes the padding of the whole microbatch.
    lengths[-1] += -sum(lengths) % alignment.total
    *starts, total = accumulate(lengths, initial=0)
    firsts = [segment.position for segment in segments] or [0]
    position_ids = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)])
    # There is no segment if all is padding.
    whole = [slice(at, at + len(s.tokens)) for s, at in zip(segments, starts, strict=False)]
    of_segments = ColumnMap(whole, total)
    # A response comes last in its segment; a shared prompt has none.
    ends = [place.stop for s, place in zip(segments, whole, strict=True) if s.index >= 0]
    members = [sequences[segment.index] for segment in segments if segment.index >= 0]
    responses = ColumnMap(
        [slice(end - len(m.rollout_logprobs), end) for m, end in zip(members, ends, strict=True)],
        total,
    )
    images = [segment.images for segment in segments if segment.images is not None]
    routes = [segment.routes for segment in segments if segment.routes is not None]
    logged = [each.log_row for each in members if each.log_row is not None]
    temperatures = [each.temperature for each in members if each.temperature is not None]
    floating = torch.empty(0, dtype=dtype).numpy().dtype
    masks = [True if each.response_mask is None else each.response_mask for each in members]
    loss_mask = responses.column(masks, bool)
    return PackedBatch(
        tokens=of_segments.column([s.tokens for s in segments], np.int64),
        position_ids=position_ids,
        cu_seqlens=torch.tensor([*starts, total], dtype=torch.int32),
        max_seqlen=int(position_ids.max()) + 1,
        context_size=alignment.context,
        sequence_index=of_segments.column([s.index for s in segments], np.int64, -1),
        completion_mask=responses.column([True] * len(members), bool),
        loss_mask=loss_mask,
        loss_weights=responses.column([each.loss_weight for each in members], floating) * loss_mask,
        advantages=responses.column([each.advantage for each in members], floating),
        rollout_logprobs=responses.column([each.rollout_logprobs for each in members], floating),
        temperatures=responses.column(temperatures, floating) if temperatures else None,
        log_rows=_log_rows(members, responses) if logged else None,
        prefixes=_prefixes(segments, starts) if share_prompts else None,
        images=_pack_images(segments, of_segments) if images else None,
        **(_laid_routes(segments, starts, total, index_topk) if routes else {}),
    )


def _log_rows(sequences: Sequence[TokenSequence], responses: ColumnMap) -> Tensor:
    rows = [
        -1 if each.log_row is None else each.log_row + torch.arange(len(each.rollout_logprobs))
        for each in sequences
    ]
    return responses.column(rows, np.int64, -1)


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """A contiguous part of a microbatch; each token is predicted from the one before it there."""

    tokens: Tensor
    routes: Tensor | None = None  # routes of the first tokens
    images: PromptImages | None = None  # images of the sequence
    position: int = 0  # position of the first token in the sequence
    index: int = -1  # index of the sequence; -1 for a shared prompt
    prefix: int | None = None  # number of the segment that this one continues

    @property
    def part(self) -> slice:
        """Bounds of the part in the sequence."""
        return slice(self.position, self.position + len(self.tokens))

    @classmethod
    def cut_from(cls, sequence: TokenSequence, part: slice, **place: int) -> "_Segment":
        """Segment with `part` of the tokens of a sequence."""
        routes = sequence.routes
        routes = None if routes is None else routes[part]
        images = sequence.images
        assert images is None or isinstance(images, PromptImages), "read images before packing"
        return cls(tokens=sequence.tokens[part], routes=routes, images=images, **place)


def _segments(
    sequences: Sequences, indices: Sequence[int], alignment: Alignment, share_prompts: bool
) -> list[_Segment]:
    present = {*indices} if share_prompts else set[int]()
    # A sequence without its root in the microbatch is packed like any other.
    roots = [i for i in indices if sequences[i].root not in present]
    groups = [[i] for i in roots]
    if share_prompts:
        groups = [[roots[i] for i in group] for group in by_prompt([sequences[i] for i in roots])]
    segments: list[_Segment] = []
    for group in groups:
        num_prompt_tokens = sequences[group[0]].num_prompt_tokens
        responses = [len(sequences[i].rollout_logprobs) for i in group]
        if len(group) == 1 or not is_shared(num_prompt_tokens, responses, alignment.sequence):
            segments += [_Segment.cut_from(sequences[i], slice(None), index=i) for i in group]
            continue
        # The prompt's last token stays with each completion, whose first token it predicts.
        position, prefix = num_prompt_tokens - 1, len(segments)
        # The longest routes: the engine never read the prompt of a dialogue that failed before its
        # first turn.
        routes = {i: sequences[i].routes for i in group}
        longest = max(group, key=lambda i: 0 if (each := routes[i]) is None else len(each))
        segments.append(_Segment.cut_from(sequences[longest], slice(position)))
        own, place = slice(position, None), {"position": position, "prefix": prefix}
        segments += [_Segment.cut_from(sequences[i], own, index=i, **place) for i in group]
    places = {segment.index: number for number, segment in enumerate(segments)}
    # Ascending: a root has a smaller index, so it already has its segment.
    for i in sorted({*indices} - {*roots}):
        position, root = sequences[i].num_prompt_tokens - 1, sequences[i].root
        assert root is not None
        place, places[i] = {"position": position, "prefix": places[root]}, len(segments)
        segments.append(_Segment.cut_from(sequences[i], slice(position, None), index=i, **place))
    return segments


def _laid_routes(
    segments: Sequence[_Segment], starts: Sequence[int], total: int, index_topk: int
) -> dict[str, Any]:
    """`routed_experts` and `chosen_tokens` of a batch, for segments that begin at `starts`.

    Tokens without routes (padding, last tokens and failed sequences) go to all experts in turn and
    attend to the first token of their sequence. No token of the loss is or reads one of these.
    """
    found = [
        (start, segment.routes)
        for start, segment in zip(starts, segments, strict=False)  # no segment if all is padding
        if segment.routes is not None
    ]
    _, routes = found[0]
    num_layers, topk = routes.shape[1], routes.shape[2] - index_topk
    experts = [routes[:, :, :topk] for _, routes in found]
    last = max((int(each.max()) for each in experts if each.numel()), default=max(topk, 1) - 1)
    in_turn = torch.arange(total * topk).view(total, 1, topk) % (last + 1)
    dtype = reduce(torch.promote_types, (routes.dtype for _, routes in found))
    laid = torch.zeros(total, num_layers, topk + index_topk, dtype=dtype)
    laid[:, :, :topk] = in_turn
    for start, routes in found:
        laid[start : start + len(routes)] = routes
    kinds = {"routed_experts": laid[:, :, :topk], "chosen_tokens": laid[:, :, topk:]}
    return {name: chosen for name, chosen in kinds.items() if chosen.shape[2]}


def _pack_images(segments: Sequence[_Segment], columns: ColumnMap) -> PackedImages:
    """Images of a microbatch of these segments, each once."""
    found = {each.images.digests: each.images for each in segments if each.images is not None}
    counts = (len(images.tokens) for images in found.values())
    first_rows = dict(zip(found, accumulate(counts, initial=0), strict=False))
    rows, positions = [], []
    for segment in segments:
        images, part = segment.images, segment.part
        numbers = torch.arange(part.start, part.stop)
        if images is None:
            rows.append(torch.full_like(numbers, -1))
            positions.append(numbers.expand(3, -1))
            continue
        # For the whole sequence: the feature of each image token in this microbatch, -1 for text.
        whole = torch.full((max(part.stop, images.positions.shape[1]),), -1)
        whole[images.tokens] = first_rows[images.digests] + torch.arange(len(images.tokens))
        rows.append(whole[part])
        positions.append(images.positions_of(part))
    return PackedImages(
        prompts=tuple(found.values()),
        rows=columns.column(rows, np.int64, -1),
        positions=torch.stack(
            [columns.column(axis, np.int64) for axis in zip(*positions, strict=True)]
        ),
    )


def _prefixes(segments: Sequence[_Segment], starts: Sequence[int]) -> Tensor:
    """`PackedBatch.prefixes` for segments that begin at `starts`."""
    parts: list[list[tuple[int, int]]] = []
    for segment in segments:
        before: list[tuple[int, int]] = []
        if segment.prefix is not None:
            start, root = starts[segment.prefix], segments[segment.prefix]
            before = [*parts[segment.prefix], (start, start + segment.position - root.position)]
        parts.append(before)
    # Rounded up to a power of two: a kernel is compiled for each number of parts.
    most = 1 << (max([1, *map(len, parts)]) - 1).bit_length()
    return torch.tensor([each + [(0, 0)] * (most - len(each)) for each in parts or [[]]])


def by_prompt(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Group sequences by prompt and its images: ascending indices, in order of first occurrence."""
    groups: dict[tuple[bytes, tuple[Hashable, ...]], list[int]] = {}
    for i, sequence in enumerate(sequences):
        length = sequence.num_prompt_tokens
        images = sequence.images.within(length) if sequence.images else ()
        groups.setdefault((sequence.tokens[:length].numpy().tobytes(), images), []).append(i)
    return list(groups.values())
