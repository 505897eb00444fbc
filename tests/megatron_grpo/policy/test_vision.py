"""Prompts with images: transformers' numbers, at every layout, with the vision tower frozen."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from checkpoint_convert import read_shape
from checkpoint_convert.text_tower import is_of_text, text_name
from helpers.images import IMAGE, normalized, sequence_with_images, tiny_vision_model
from helpers.policies import (
    LOSS_WEIGHT,
    Numbers,
    OracleCase,
    layout_name,
    numbers_of,
    tiny_config,
)
from helpers.ranks import run_ranks
from megatron_grpo.policy.model import build_policy
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.packing import TokenSequence, pack

# Microbatches: several images of different sizes, a text beside them, text alone, nothing.
GRIDS = [[[(4, 6), (4, 4)], [(8, 4)], []], [[(6, 6)]], [[]], []]


def sequences() -> list[TokenSequence]:
    grids = [each for microbatch in GRIDS for each in microbatch]
    return [
        sequence_with_images(each, 5 + 3 * seed, seed, LOSS_WEIGHT)
        for seed, each in enumerate(grids)
    ]


def oracle_logprobs(model, sequence: TokenSequence) -> torch.Tensor:
    tokens, images, first = sequence.tokens, sequence.images, sequence.num_prompt_tokens
    inputs = {"input_ids": tokens[None]}
    if images is not None:
        types = torch.zeros_like(tokens)
        types[images.tokens] = 1
        inputs |= {
            "pixel_values": normalized(images.patches),
            "image_grid_thw": images.grids,
            "mm_token_type_ids": types[None],
        }
        # transformers puts features in the place of every such token, also of sampled ones.
        is_sampled = (tokens == IMAGE) & ~types.bool()
        embedded = model.get_input_embeddings()(tokens[None])
        features = model.model.get_image_features(
            inputs["pixel_values"], images.grids, return_dict=True
        ).pooler_output
        embedded = embedded.clone()
        embedded[0, images.tokens] = torch.cat(features)
        positions, _ = model.model.get_rope_index(
            tokens[None], types[None], image_grid_thw=images.grids
        )
        assert is_sampled.any()
        inputs = {"inputs_embeds": embedded, "position_ids": positions}
    logits = model(**inputs).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[first:, None])[:, 0]


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> OracleCase:
    folder = tiny_vision_model(tmp_path_factory.mktemp("vision"))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    model.model.visual.requires_grad_(False)
    logprobs = [oracle_logprobs(model, each) for each in sequences()]
    (-LOSS_WEIGHT * torch.cat(logprobs).sum()).backward()
    gradients = {
        text_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if is_of_text(text_name(name))
    }
    return OracleCase(folder, [each.detach() for each in logprobs], gradients)


def numbers_on_rank(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> Numbers:
    setup_device(rank)
    cfg = tiny_config(folder, dims, "data.image_column=images", *overrides)
    groups = init_groups(dims, dynamic_context=cfg.parallel.dynamic_context_parallel)
    policy = build_policy(cfg, read_shape(folder), groups)
    numbers = iter(range(sum(map(len, GRIDS))))
    batches = [
        pack(
            sequences(),
            [next(numbers) for _ in microbatch],
            Alignment.for_mesh(dims, dims.tensor > 1),
            share_prompts=cfg.grpo.shared_prompts,
        )
        for microbatch in GRIDS
    ]
    if policy.vision:
        batches = [policy.vision.see(batch) for batch in batches]
    return numbers_of(policy, groups, batches)


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(),
        ParallelDims(tensor=2),
        ParallelDims(context=2, pipeline=2),
    ],
    ids=layout_name,
)
def test_logprobs_and_gradients_equal_transformers(case, dims):
    case.check(run_ranks(dims.world_size, numbers_on_rank, case.folder, dims))
