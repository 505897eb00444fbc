"""The training sequences of an optimizer batch: one per sample, or one per branch of an agent's
session.

Sequences have numbers, which a microbatch keeps as `sequence_index`. Branches of sample i of n have
the numbers i, n + i, 2 n + i, ..., so every rank knows the sample of a sequence without
communication.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.data.images import PromptSources
from megatron_grpo.data.samples import Branch, Sample
from parallel.packing import TokenSequence, by_prompt
from parallel.shared_prefix import Branched, PromptGroup

BY_TOKEN = ("advantage", "rollout_logprobs", "response_mask")
"""Fields of a sequence with one value per token of the completion."""
MOST_PARTS = 8
"""Maximum parts of other sequences that a sequence shares: a GPU kernel is compiled for each power
of two."""


def numbered_sequences(
    samples: Sequence[Sample], wholes: Sequence[TokenSequence]
) -> dict[int, TokenSequence]:
    """Cut the samples into training sequences, by number. `wholes` are prompt and whole completion
    of each sample."""
    found = dict(enumerate(wholes))
    for i, (sample, whole) in enumerate(zip(samples, wholes, strict=True)):
        for k, branch in enumerate(sample.branches):
            root = _root(sample, branch)
            root = None if root is None else root * len(samples) + i
            found[k * len(samples) + i] = replace(cut_out(whole, branch), root=root)
    return found


def _root(sample: Sample, branch: Branch) -> int | None:
    """Index of the branch that sampled the token before `branch`. None if that token belongs to the
    prompt, or if the branch shares more than MOST_PARTS parts."""
    if len(branch.context) > MOST_PARTS:
        return None
    _, end = branch.context[-1]
    last = end - 1 - len(sample.prompt.token_ids)
    return next(
        (k for k, each in enumerate(sample.branches) if each.start <= last < each.end), None
    )


def prompt_groups(sequences: Mapping[int, TokenSequence]) -> list[PromptGroup]:
    """Group the sequences by prompt. A branch that continues after a sampled token joins the group
    of the sequence that it branches off."""
    places = {number: place for place, number in enumerate(sequences)}
    branches: dict[int, dict[int, Branched]] = defaultdict(dict)
    firsts: list[int] = []
    for number, sequence in sequences.items():
        if sequence.root is None:
            firsts.append(number)
            continue
        # A root may branch off another sequence in turn; the first of the chain has the prompt.
        first = sequence.root
        while (root := sequences[first].root) is not None:
            first = root
        branches[places[first]][places[number]] = Branched(
            places[sequence.root], sequence.num_prompt_tokens, len(sequence.rollout_logprobs)
        )
    groups = []
    for group in by_prompt([sequences[number] for number in firsts]):
        members = {places[firsts[i]]: sequences[firsts[i]] for i in group}
        [num_prompt_tokens] = {each.num_prompt_tokens for each in members.values()}
        groups.append(
            PromptGroup(
                num_prompt_tokens=num_prompt_tokens,
                responses={place: len(each.rollout_logprobs) for place, each in members.items()},
                branches={place: branches[place] for place in members if place in branches},
            )
        )
    return groups


def cut_out(whole: TokenSequence, branch: Branch) -> TokenSequence:
    """Cut one branch out of prompt and whole completion `whole`, with its part of the values by
    token."""
    first = whole.num_prompt_tokens
    bounds = [*branch.context, (first + branch.start, first + branch.end)]
    values: dict[str, Any] = {name: getattr(whole, name) for name in BY_TOKEN}
    own: dict[str, Any] = {
        name: value[branch.start : branch.end]
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    tokens, routes, row = _joined(whole.tokens, bounds), whole.routes, whole.log_row
    images = whole.images
    assert images is None or isinstance(images, PromptSources), "images are read after the cut"
    return replace(
        whole,
        **own,
        tokens=tokens,
        num_prompt_tokens=len(tokens) - (branch.end - branch.start),
        # One row fewer than tokens: the engine never read the last token of a branch.
        routes=None if routes is None else _joined(routes, bounds)[: len(tokens) - 1],
        log_row=None if row is None else row + branch.start,
        images=images.cut_out(bounds) if images else None,
    )


def _joined(values: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([values[start:end] for start, end in bounds])
