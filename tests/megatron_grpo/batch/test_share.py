"""Shares: the sequences that each data rank packs; derived values are not sent."""

import pickle
from dataclasses import replace

import pytest
import torch

from helpers.models.images import sequence_with_images, with_completion, with_other_pixels
from megatron_grpo.batch.distribute import DataParallelShard
from megatron_grpo.policy.vision import with_features
from parallel.alignment import Alignment
from parallel.images import PromptImages
from parallel.microbatches import Turn, fixed_turns
from parallel.packing import PackedBatch, TokenSequence, pack

ALIGNMENT = Alignment(sequence=4, total=8)


def sequences(*, process: bool = False, has_routes: bool = False) -> list[TokenSequence]:
    """Five sequences: the first two have one prompt, the last has no routes."""
    generator = torch.Generator().manual_seed(0)
    prompts = [(11, 12, 13), (11, 12, 13), (14,), (15, 16), (17, 18, 19, 20)]
    made = []
    for length, prompt in zip((5, 1, 7, 0, 3), prompts, strict=True):

        def values(count: int = length) -> torch.Tensor:
            return torch.randn(count, generator=generator)

        completion = torch.randint(30, 99, (length,), generator=generator)
        num_routed = 0 if len(made) == 4 else len(prompt) + length - 1
        routes = torch.rand(num_routed, 2, 5, generator=generator).topk(3).indices.byte()
        made.append(
            TokenSequence(
                tokens=torch.cat([torch.tensor(prompt), completion]).int(),
                num_prompt_tokens=len(prompt),
                advantage=values().double() if process else float(values(1)),
                loss_weight=1 / 3,
                rollout_logprobs=values(),
                response_mask=values() > 0,
                routes=routes if has_routes else None,
            )
        )
    return made


def turns(microbatches: list[list[int]]) -> list[Turn]:
    [of_rank] = fixed_turns([microbatches], 1)
    return of_rank


def assert_equal(batch: PackedBatch, expected: PackedBatch) -> None:
    for name, value in vars(expected).items():
        found = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value), name
        else:
            assert found == value, name


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("process", [False, True])
def test_a_sent_share_packs_like_its_sequences(process: bool, share_prompts: bool) -> None:
    given = sequences(process=process, has_routes=process)
    microbatches = [[4, 0, 1], [], [2]]
    share = pickle.loads(pickle.dumps(DataParallelShard.of(given, turns(microbatches))))
    batches = share.pack(ALIGNMENT, share_prompts=share_prompts)
    for batch, indices in zip(batches, microbatches, strict=True):
        assert_equal(batch, pack(given, indices, ALIGNMENT, share_prompts=share_prompts))


def test_images_are_sent_and_seen_once_for_all_completions_of_a_prompt() -> None:
    first = sequence_with_images([(4, 6), (4, 4)], 5, seed=0)
    group = [first, *(with_completion(first, 7, seed=seed) for seed in (1, 2, 3))]
    given = [*group, with_other_pixels(first), sequence_with_images([], 5, seed=9)]
    microbatches = [[0, 5, 1], [2, 4], [3], []]
    size = 10_000  # bytes of an image file
    files = {
        each.images: each.images and "".join(each.images.digests).ljust(size).encode()
        for each in given
    }
    unread = [replace(each, images=files[each.images]) for each in given]
    sent = pickle.dumps(DataParallelShard.of(unread, turns(microbatches)))
    assert 2 * size < len(sent) < 2.5 * size  # images of two prompts
    received = pickle.loads(sent)
    assert received.sources == [files[given[i].images] for i in (0, 4)]
    read = received.with_images({file: images for images, file in files.items()})
    batches = read.pack(ALIGNMENT, share_prompts=False)
    tower = Tower()
    found = zip(with_features(batches, tower), with_features(batches, None), strict=True)
    for (of_first, of_other), indices in zip(found, microbatches, strict=True):
        expected, seen = pack(given, indices, ALIGNMENT).images, of_first.images
        if expected is None:
            assert seen is None
            continue
        assert torch.equal(seen.rows, expected.rows)
        assert torch.equal(seen.positions, expected.positions)
        kept = [tower.seen[each.digests] for each in expected.prompts]
        assert [*map(id, seen.features)] == [*map(id, kept)] and seen.prompts == ()
        assert of_other.images.features is None and of_other.images.prompts == ()
    assert [*tower.seen] == [first.images.digests, given[4].images.digests]


class Tower:
    """Stands for a vision tower: two bytes of an image for each of its tokens."""

    is_trained = False

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def features(self, images: PromptImages) -> torch.Tensor:
        assert images.digests not in self.seen
        self.seen[images.digests] = images.patches[::4, :2]
        return self.seen[images.digests]


def test_nine_bytes_are_sent_for_each_token_of_a_completion() -> None:
    length = 10_000
    long = TokenSequence(
        tokens=torch.zeros(1 + length, dtype=torch.int32),
        num_prompt_tokens=1,
        advantage=0.0,
        loss_weight=0.0,
        rollout_logprobs=torch.zeros(length),
        response_mask=torch.ones(length, dtype=torch.bool),
    )
    sent = pickle.dumps(DataParallelShard.of([long, long], turns([[0], [1]])))
    assert 9 * 2 * length < len(sent) < 9.5 * 2 * length
