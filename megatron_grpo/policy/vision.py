"""The vision tower of a multimodal model: transformers' own, with its weights as they are.

It has no gradient, so that each image passes through it once: its features are kept with the
microbatch for all passes over it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert.hf_config import read_json
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from parallel.groups import Groups
from parallel.images import PackedImages
from parallel.packing import PackedBatch

# In weight files as they were published, and as transformers writes them.
_NAMES = {r"^(model\.)?visual\.": ""}


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
        scale = processor.rescale_factor
        self._mean, self._std = (
            (torch.tensor(values) / scale).view(1, -1, 1).to(device)
            for values in (processor.image_mean, processor.image_std)
        )
        tower: Any = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
        self._tower, loaded = tower.from_pretrained(
            folder,
            config=AutoConfig.from_pretrained(folder).vision_config,
            key_mapping=_NAMES,
            dtype=dtype,
            output_loading_info=True,
        )
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(f"{folder} lacks weights of its vision tower: {', '.join(missing)}")
        self._tower.to(device).requires_grad_(False)

    def see(self, batch: PackedBatch) -> PackedBatch:
        """The microbatch with the features of its images, which need their patches no more."""
        if batch.images is None:
            return batch
        images = replace(batch.images, features=self.features(batch.images))
        return replace(batch, images=replace(images, patches=images.patches[:0]))

    @torch.no_grad()
    def features(self, images: PackedImages) -> Tensor:
        """[features, hidden size] of images whose patches are bytes as they were in the files."""
        pixels = images.patches.view(len(images.patches), self._mean.shape[1], -1)
        normal = ((pixels - self._mean) / self._std).flatten(1)
        found: Tensor = self._tower(normal, grid_thw=images.grids).pooler_output
        return found


def vision_tower(cfg: Config, groups: Groups, device: torch.device) -> VisionTower | None:
    """The tower, on ranks of the first pipeline stage if prompts have images."""
    if cfg.data.image_column is None or groups.coordinates.pipeline:
        return None
    return VisionTower(cfg.model.path, getattr(torch, cfg.model.dtype), device)


def embedded(chunk: Any, batch: PackedBatch, local: Tensor, groups: Groups) -> Tensor | None:
    """Embeddings of this rank's tokens, with features in the places of images: [t, 1, H].

    None if there are no images, or not the embedding: the chunk then does what it does with text.
    """
    images = batch.images
    if images is None or not chunk.pre_process:
        return None
    assert images.features is not None, "set by `VisionTower.see`"
    tokens: Tensor = chunk.embedding(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
    )
    rows = images.rows[local]
    if chunk.config.sequence_parallel:
        rows = rows.chunk(groups.dims.tensor)[groups.coordinates.tensor]
    features = images.features[rows.clamp(min=0)].to(tokens.dtype)
    return torch.where((rows >= 0).unsqueeze(1), features, tokens.squeeze(1)).unsqueeze(1)
