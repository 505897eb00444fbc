"""Positions and features of images in packed microbatches."""

import torch

from helpers.models.images import (
    IMAGE,
    branch_with_image,
    sequence_with_images,
    with_completion,
    with_other_pixels,
)
from parallel.alignment import Alignment
from parallel.images import prompt_positions
from parallel.packing import by_prompt, pack


def test_text_continues_after_the_largest_position_of_an_image():
    # Text, an image of 2 x 3 tokens, text, an image of one token, text; one token each.
    positions = prompt_positions(10, [1, 8], [(1, 2, 3), (1, 1, 1)])
    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


def test_a_group_has_its_images_once_and_equal_tokens_with_other_images_are_another_prompt():
    first = sequence_with_images([(4, 6), (4, 4)], 5, seed=0)
    group = [first, with_completion(first, 7, seed=1), with_other_pixels(first)]
    assert by_prompt(group) == [[0, 1], [2]]
    later = [branch_with_image(first, (4, 4), seed) for seed in (1, 2)]
    assert by_prompt(later) == [[0, 1]]  # images behind the prompt
    batch = pack(group, [0, 1, 2], Alignment(), share_prompts=True)
    images = batch.images
    assert len(batch.tokens) < sum(len(each.tokens) for each in group)
    assert images.prompts == tuple(each.images for each in group[::2])
    # Features follow the prompts' tokens; a sampled image token gets none.
    assert images.rows[images.rows >= 0].tolist() == [*range(20)]
    assert (batch.tokens[images.rows >= 0] == IMAGE).all()
    for index, each in enumerate(group):
        own = batch.sequence_index == index
        end = each.images.positions.max() + 1 + torch.arange(len(each.rollout_logprobs))
        assert torch.equal(images.positions[:, own][:, -len(end) :], end.expand(3, -1))


def test_prompts_of_text_have_no_images():
    assert pack([sequence_with_images([], 5, seed=0)], [0], Alignment()).images is None
    assert pack([], [], Alignment()).images is None
