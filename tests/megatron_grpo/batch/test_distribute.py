"""Images reach the ranks that train on them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.models.images import picture, prompts_with_images, tiny_vision_model
from helpers.ranks.processes import run_ranks
from megatron_grpo.batch.distribute import DataParallelShard, distribute
from megatron_grpo.data.images import PromptSources
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.images import PromptImages
from parallel.microbatches import Turn
from parallel.packing import TokenSequence


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def given(model, tmp_path, monkeypatch) -> list[TokenSequence]:
    """Two sequences; each prompt has an image with a path relative to the working folder."""
    picture(60, 90, seed=0).save(tmp_path / "0.png")
    picture(90, 60, seed=1).save(tmp_path / "1.png")
    prompts = prompts_with_images(model, tmp_path, ["0.png", "1.png"])
    monkeypatch.chdir(tmp_path)
    return [
        TokenSequence(
            tokens=torch.tensor([*each.token_ids, 5], dtype=torch.int32),
            num_prompt_tokens=len(each.token_ids),
            advantage=1.0,
            loss_weight=1.0,
            rollout_logprobs=torch.zeros(1),
            images=with_relative_path(each.images),
        )
        for each in prompts
    ]


def with_relative_path(sources: PromptSources) -> PromptSources:
    [image] = sources.images
    return replace(sources, images=(replace(image, content=Path(image.name)),))


def read_on_rank(
    rank: int, dims: ParallelDims, given: list[TokenSequence], folders: list[Path]
) -> PromptImages:
    """The image of sequence d, if this is data rank d, read in the working folder
    `folders[rank]`."""
    os.chdir(folders[rank])
    setup_device(rank)
    groups, shards = init_groups(dims), None
    if rank == 0:
        all_turns = [[Turn(context_size=1, microbatches=[[i]])] for i in range(dims.data)]
        shards = [DataParallelShard.of(dict(enumerate(given)), turns) for turns in all_turns]
    shard = distribute(shards, groups, has_tower=groups.coordinates.pipeline == 0)
    [images] = shard.columns["images"]
    return images


def folder_with(path: Path, *files: Path) -> Path:
    path.mkdir()
    for file in files:
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_only_ranks_with_the_tower_read_images_and_only_of_their_prompts(given, tmp_path):
    own = [folder_with(tmp_path / f"own{i}", Path(f"{i}.png")) for i in (0, 1)]
    none = folder_with(tmp_path / "none")
    dims = ParallelDims(data=2, pipeline=2)
    found = run_ranks(4, read_on_rank, dims, given, [*own, none, none])
    for data, sequence in enumerate(given):
        wanted, (first, last) = sequence.images.read(), found[data::2]
        assert torch.equal(first.patches, wanted.patches) and len(last.patches) == 0
        for each in (first, last):
            assert each == wanted and torch.equal(each.positions, wanted.positions)
            assert torch.equal(each.tokens, wanted.tokens)


@pytest.mark.parametrize(
    ("axis", "changed", "error"),
    [
        ("data", (90, 90), "OSError: '1.png': it has 9 tokens now, and had 6 when"),
        # Tensor ranks would compute with different features of one image.
        ("tensor", (60, 90), "OSError: '0.png': rank 0 read other pixels than rank 1"),
    ],
)
def test_a_file_that_ranks_read_differently_is_named(given, tmp_path, axis, changed, error):
    file = Path("1.png" if axis == "data" else "0.png")
    whole, other = (folder_with(tmp_path / name, Path("0.png"), file) for name in ("a", "b"))
    picture(*changed, seed=9).save(other / file)
    with pytest.raises(AssertionError, match="rank 1 of 2 failed") as failed:
        run_ranks(2, read_on_rank, ParallelDims(**{axis: 2}), given, [whole, other])
    assert error in str(failed.value)
