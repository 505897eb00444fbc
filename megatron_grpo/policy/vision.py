"""The vision tower of a multimodal model: transformers' own, with its weights as they are.

It has no gradient, so that each image passes through it once: its features are kept with the
microbatches of an optimizer batch for all passes over them. Every tensor and context rank of the
first stage computes those of all images of its microbatches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert.folder import read_json
from checkpoint_convert.formats.hf_folder import other_towers
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from parallel import Box
from parallel.groups import Groups
from parallel.images import PromptImages
from parallel.packing import PackedBatch

_PREFIX = "visual."


def mrope_sections(cfg: Config) -> Sequence[int]:
    """Numbers of RoPE's frequencies that rotate by a token's position in time, height and width;
    none if prompts have no images, and all three are equal."""
    if cfg.data.image_column is None:
        return ()
    file = Path(cfg.model.path) / "config.json"
    text = text_config(file, read_json(file))
    rope = text.get("rope_scaling") or text["rope_parameters"]
    sections: list[int] = rope["mrope_section"]
    return sections


class VisionTower:
    """Turns the patches of images into features of the text tower's size."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        # They take seconds to import, and only ranks of the first pipeline stage see images.
        from transformers import AutoConfig, AutoImageProcessor  # noqa: PLC0415
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: PLC0415

        processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._mean, self._std = (
            (torch.tensor(values) / processor.rescale_factor).view(1, -1, 1).to(device)
            for values in (processor.image_mean, processor.image_std)
        )
        kind: Any = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
        config = AutoConfig.from_pretrained(folder).vision_config
        self._tower = kind._from_config(config, dtype=dtype)
        self._tower.load_state_dict(_weights(folder))
        self._tower.to(device).requires_grad_(False)

    @torch.no_grad()
    def features(self, images: PromptImages) -> Tensor:
        """[features, hidden size] of images whose patches are bytes as they were in the files."""
        patches = images.patches.to(self._mean.device)
        pixels = patches.view(len(patches), self._mean.shape[1], -1)
        normal = ((pixels - self._mean) / self._std).flatten(1)
        grids = images.grids.to(patches.device)
        found: Tensor = self._tower(normal, grid_thw=grids).pooler_output
        return found


def _weights(folder: Path) -> dict[str, Tensor]:
    """Those of the tower, by its own names: `model.` comes before them in newer files."""
    _, others = other_towers(folder)
    places = {name: place for name, place in others.items() if _PREFIX in name}
    weights = {}
    with closing(StoredTensors(places)) as stored:
        for name, place in places.items():
            values = torch.empty(place.shape, dtype=DTYPES[place.dtype])
            stored.read_into(name, Box.whole(place.shape), values)
            weights[name.partition(_PREFIX)[2]] = values
    return weights


def vision_tower(cfg: Config, groups: Groups, device: torch.device) -> VisionTower | None:
    """The tower, on ranks of the first pipeline stage if prompts have images."""
    if cfg.data.image_column is None or groups.coordinates.pipeline:
        return None
    return VisionTower(cfg.model.path, getattr(torch, cfg.model.dtype), device)


def with_features(
    batches: Iterable[PackedBatch], vision: VisionTower | None
) -> Iterator[PackedBatch]:
    """The microbatches of an optimizer batch with the features of their images, on ranks that have
    the tower, in the place of patches; those of a prompt are computed once."""
    known: dict[str, Tensor] = {}
    for batch in batches:
        if batch.images is None:
            yield batch
            continue
        features = None
        if vision is not None:
            for images in batch.images.prompts:
                if images.digest not in known:
                    known[images.digest] = vision.features(images)
            features = torch.cat([known[images.digest] for images in batch.images.prompts])
        yield replace(batch, images=replace(batch.images, prompts=(), features=features))


def embedded(chunk: Any, batch: PackedBatch, local: Tensor, groups: Groups) -> Tensor | None:
    """Embeddings of this rank's tokens, with features in the places of images: [t, 1, H].

    None if there are no images, or not the embedding: the chunk then does what it does with text.
    """
    images = batch.images
    if images is None or not chunk.pre_process:
        return None
    assert images.features is not None, "set by `with_features`"
    tokens: Tensor = chunk.embedding(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
    )
    rows = images.rows[local]
    if chunk.config.sequence_parallel:
        rows = rows.chunk(groups.dims.tensor)[groups.coordinates.tensor]
    features = images.features[rows.clamp(min=0)].to(tokens.dtype)
    return torch.where((rows >= 0).unsqueeze(1), features, tokens.squeeze(1)).unsqueeze(1)
