"""Rows of multimodal models: prompts with images, and prompts of text alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from checkpoint_convert import read_shape
from checkpoint_convert.folder import read_json
from checkpoint_convert.text_tower import is_of_text, text_name
from helpers.models.images import (
    branch_with_image,
    logits,
    sequence_with_images,
    with_completion,
    with_other_pixels,
)
from helpers.models.towers import as_published
from helpers.oracle.grpo import in_float64
from helpers.oracle.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    OracleCase,
    gradients_of,
    load_oracle,
    own_share,
    random_sequences,
    unstacked,
)
from helpers.oracle.rows import Kind
from megatron_grpo.config.config import Config
from parallel.alignment import Alignment
from parallel.groups import Groups
from parallel.packing import PackedBatch, TokenSequence, pack

# Prompts with images of several sizes, packed with text and a branch of the first, which has one
# more image; text alone; an empty microbatch.
MICROBATCHES = [[0, 1, 2, 3, 4, 7], [5], [6], []]


def sequences(family: str) -> list[TokenSequence]:
    grids = [[(4, 6), (4, 4)], [(8, 4)], [], [(6, 6)], []]
    first, *others = (
        sequence_with_images(each, 5 + 3 * seed, seed, LOSS_WEIGHT, family)
        for seed, each in enumerate(grids)
    )
    branch = branch_with_image(first, (4, 4), seed=8, family=family)
    return [first, with_completion(first, 9, seed=7), with_other_pixels(first), *others, branch]


def family_of(folder: Path) -> str:
    return read_json(folder / "config.json")["model_type"]


def logprobs_with_images(model: Any, sequence: TokenSequence) -> Tensor:
    tokens, first = sequence.tokens[None], sequence.num_prompt_tokens
    found = logits(model, tokens, sequence.images)[0, first - 1 : -1]
    return found.log_softmax(-1).gather(1, tokens[0, first:, None])[:, 0]


def multimodal_case(folder: Path, tokens: list[TokenSequence]) -> OracleCase:
    model = load_oracle(folder, AutoModelForImageTextToText)
    with in_float64():
        logprobs = [logprobs_with_images(model, each) for each in tokens]
        found = gradients_of(model, -LOSS_WEIGHT * torch.cat(logprobs).sum())
    found = as_published(found, family_of(folder))
    found = {text_name(name): gradient for name, gradient in found.items()}
    towers = {name: each for name, each in found.items() if not is_of_text(name)}
    gradients = towers | unstacked(found, read_shape(folder))
    return OracleCase(folder, [each.detach() for each in logprobs], gradients)


class TextTower(Kind):
    name = "text"

    def oracle(self, folder: Path) -> OracleCase:
        return multimodal_case(folder, random_sequences(LENGTHS))


class Images(Kind):
    """Prompts with images; the vision tower is frozen."""

    name, overrides, frozen = "images", ("data.image_column=images",), "visual."

    def pack(
        self, cfg: Config, groups: Groups, dtype: torch.dtype = torch.float32
    ) -> list[PackedBatch]:
        dims, shares = groups.dims, cfg.grpo.shared_prompts
        alignment, every = (
            Alignment.for_mesh(dims, dims.tensor > 1),
            sequences(family_of(cfg.model.path)),
        )
        packed = [
            pack(every, each, alignment, share_prompts=shares, dtype=dtype) for each in MICROBATCHES
        ]
        return own_share(packed, groups)

    def oracle(self, folder: Path) -> OracleCase:
        return multimodal_case(folder, sequences(family_of(folder)))


class TrainedImages(Images):
    """Prompts with images; the vision tower is trained."""

    name, frozen = "trained tower", ""
    overrides = (*Images.overrides, "model.freeze_vision=false")
