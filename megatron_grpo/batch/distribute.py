"""Divides a generation over the data-parallel ranks and sends each rank its part.

Parts are sent unpacked, 9 bytes per token instead of 38 (more with replayed experts), and every
rank packs its own. Images are sent as they are in the data. Each rank with the vision tower makes
the pixels of its part, as sending them, 4.7 kB per token of an image, would take longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.algorithm.loss import loss_weights
from megatron_grpo.batch.branches import numbered_sequences, prompt_groups
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.batch.token_log import first_rows
from megatron_grpo.config.config import Config
from megatron_grpo.data.images import PromptSources, read_images
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.groups import Groups
from parallel.images import PromptImages
from parallel.microbatches import CostModel, Turn, fixed_turns, numbered, plan_microbatches
from parallel.packing import PackedBatch, TokenSequence, pack
from parallel.shared_prefix import plan_shared_prompts
from parallel.turns import plan_turns


@dataclass(frozen=True, kw_only=True)
class DataParallelShard:
    """The sequences of one data rank, and their division into microbatches.

    Tokens and their values are concatenated, one tensor per field of `TokenSequence`: thousands of
    small tensors would take seconds to pickle.
    """

    turns: list[Turn]
    """Turns, whose microbatches list numbers of sequences; see `branches`."""
    columns: dict[str, list[Any] | Tensor]
    """Values of all sequences by field, in the order of the microbatches: a list, or concatenated
    tensors."""
    lengths: dict[str, list[int]]
    """Lengths of the concatenated tensors, by field."""

    @classmethod
    def of(cls, sequences: Mapping[int, TokenSequence], turns: list[Turn]) -> "DataParallelShard":
        """Build the shard with these `turns` of an optimizer batch of `sequences`.

        Each field must be a tensor in all `sequences` or in none.
        """
        chosen = [sequences[i] for i in _members(turns)]
        columns: dict[str, list[Any] | Tensor] = {}
        lengths: dict[str, list[int]] = {}
        for field in fields(TokenSequence):
            values = [getattr(sequence, field.name) for sequence in chosen]
            columns[field.name] = values
            if values and isinstance(values[0], Tensor):
                columns[field.name] = torch.cat(values)
                lengths[field.name] = [len(value) for value in values]
        return cls(turns=turns, columns=columns, lengths=lengths)

    def pack(self, alignment: Alignment, *, share_prompts: bool) -> list[PackedBatch]:
        """Pack all `microbatches` of the first context rank."""
        return [*self.microbatches(alignment, share_prompts=share_prompts)]

    def microbatches(
        self,
        alignment: Alignment,
        *,
        share_prompts: bool,
        context_rank: int = 0,
        index_topk: int = 0,
    ) -> Iterator[PackedBatch]:
        """Pack the microbatches of a context rank, one by one; see `parallel.packing.pack`."""
        values = [
            column.split(self.lengths[name]) if isinstance(column, Tensor) else column
            for name, column in self.columns.items()
        ]
        sequences = {
            number: TokenSequence(**dict(zip(self.columns, of_sequence, strict=True)))
            for number, *of_sequence in zip(_members(self.turns), *values, strict=True)
        }
        for turn in self.turns:
            yield pack(
                sequences,
                turn.microbatches[context_rank // turn.context_size],
                alignment
                if turn.context_size == alignment.context
                else alignment.for_context(turn.context_size),
                share_prompts=share_prompts,
                index_topk=index_topk,
            )

    @property
    def sources(self) -> list[PromptSources]:
        """Images of the shard's prompts, without duplicates."""
        return [*dict.fromkeys(each for each in self.columns["images"] if each is not None)]

    def with_images(
        self, found: Mapping[PromptSources | None, PromptImages]
    ) -> "DataParallelShard":
        """Replace each of the `sources` by its images in `found`."""
        images = [each if each is None else found[each] for each in self.columns["images"]]
        return replace(self, columns=self.columns | {"images": images})


def _members(turns: Sequence[Turn]) -> list[int]:
    return [i for turn in turns for i in chain(*turn.microbatches)]


def split_for_data_parallel(
    experience: Experience,
    generation: int,
    cost: CostModel,
    cfg: Config,
    dims: ParallelDims,
    alignment: Alignment,
) -> Iterator[list[DataParallelShard]]:
    """Divide each optimizer batch of the generation: one shard per data rank.

    `cost` estimates a sequence's cost by its length, to balance the data ranks. Loss weights are
    fixed here, over the whole optimizer batch, so they do not depend on the packing.
    """
    for indices in BatchSchedule.of(cfg.grpo).minibatches(generation, cfg.train.seed):
        samples = [experience.samples[i] for i in indices]
        wholes = _sequences(experience, indices, cfg)
        sequences = dict(enumerate(wholes))
        if any(sample.branches for sample in samples):
            sequences = numbered_sequences(samples, wholes)
        plan = _plan(sequences, cost, cfg, dims, alignment)
        numbers = [*sequences]
        yield [DataParallelShard.of(sequences, numbered(turns, numbers)) for turns in plan]


def _plan(
    sequences: dict[int, TokenSequence],
    cost: CostModel,
    cfg: Config,
    dims: ParallelDims,
    alignment: Alignment,
) -> list[list[Turn]]:
    """Plan the turns of each data rank, whose microbatches list positions in `sequences`."""
    max_tokens = cfg.train.max_tokens_per_microbatch
    if cfg.grpo.shared_prompts:
        plan = plan_shared_prompts(prompt_groups(sequences), max_tokens, dims, alignment, cost)
        return fixed_turns(plan, dims.context)
    lengths = [len(sequence.tokens) for sequence in sequences.values()]
    if cfg.parallel.dynamic_context_parallel:
        return plan_turns(lengths, max_tokens, dims, alignment, cost)
    plan = plan_microbatches(lengths, max_tokens, dims, alignment, cost)
    return fixed_turns(plan, dims.context)


def _sequences(experience: Experience, indices: list[int], cfg: Config) -> list[TokenSequence]:
    """Build prompt and whole completion of each sample."""
    samples = [experience.samples[i] for i in indices]
    masks = []
    for i, sample in zip(indices, samples, strict=True):  # all zero if filtered, or not scored
        is_overlong = cfg.grpo.overlong_filter and sample.finish_reason == "length"
        counts = not is_overlong and not bool(experience.totals[i].isnan())
        masks.append(torch.from_numpy(np.asarray(sample.loss_mask, np.bool_) & counts))
    weights = loss_weights(
        torch.stack([mask.sum() for mask in masks]),
        cfg.grpo.aggregation,
        cfg.grpo.loss_denominator or cfg.rollout.max_completion_length,
    )
    lengths = [len(sample.completion_ids) for sample in samples]
    log_rows = first_rows(lengths, cfg.train.log_tokens)
    has_own = any(sample.temperature is not None for sample in samples)
    routed = [sample.routes for sample in samples if sample.routes is not None]
    return [
        TokenSequence(
            # int32: half as much to send as the int64 that a model takes.
            tokens=torch.from_numpy(
                np.concatenate([sample.prompt.token_ids, sample.completion_ids], dtype=np.int32)
            ),
            num_prompt_tokens=len(sample.prompt.token_ids),
            advantage=experience.token_advantages[i]
            if experience.token_advantages
            else float(experience.advantages[i]),
            loss_weight=float(weight),
            rollout_logprobs=torch.from_numpy(np.asarray(sample.logprobs, np.float32)),
            response_mask=mask,
            # A field is a tensor in all sequences or in none.
            routes=torch.from_numpy(routed[0][:0] if sample.routes is None else sample.routes)
            if routed
            else None,
            log_row=log_row,
            temperature=(sample.temperature or cfg.rollout.temperature) if has_own else None,
            images=sample.prompt.images,
        )
        for sample, i, mask, weight, log_row in zip(
            samples, indices, masks, weights, log_rows, strict=True
        )
    ]


Minibatches = list[list[PackedBatch]]
"""Microbatches of one data-parallel rank, for each optimizer step."""


def distribute(
    shards: list[DataParallelShard] | None, groups: Groups, *, has_tower: bool
) -> DataParallelShard:
    """Give every rank its shard of an optimizer batch, with pixels if the rank `has_tower`.

    `shards`, one per data rank, is read on rank 0 only; other ranks pass None. Raises OSError for
    unreadable images, or if a rank reads other pixels than the first of its replica.
    """
    # Two hops, so that no data crosses the same link twice: rank 0 scatters to the first rank of
    # every model replica, which broadcasts within its replica.
    received: list[DataParallelShard | None] = [None]
    leader = dist.get_global_rank(groups.replica, 0)
    if groups.rank == leader:
        dist.scatter_object_list(received, shards, src=0, group=groups.data_gloo)
    dist.broadcast_object_list(received, src=leader, group=groups.replica)
    assert received[0] is not None
    if not (sources := received[0].sources):
        return received[0]
    images = read_images(sources, lambda images: images) if has_tower else {}
    # Stages without the tower need only the sizes, for positions. These are known after decoding,
    # as EXIF may swap the sides, so they come from the rank that decodes.
    sizes = [replace(each, patches=each.patches.new_empty(0)) for each in images.values()]
    found: list[list[PromptImages]] = [sizes]
    dist.broadcast_object_list(found, src=leader, group=groups.replica)
    of_leader: dict[PromptSources | None, PromptImages] = dict(zip(sources, found[0], strict=True))
    for each in sources if has_tower else ():
        if images[each] != of_leader[each]:
            raise OSError(
                f"{each.shown}: rank {leader} read other pixels than rank {groups.rank}: use files "
                "that do not change, on a file system that all hosts share, and equal packages"
            )
    return received[0].with_images(images or of_leader)
