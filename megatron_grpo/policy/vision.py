"""The vision tower of a multimodal model: transformers' own, with its weights as they are.

It has no gradient, so that each image passes through it once: its features are kept with the
microbatches of an optimizer batch for all passes over them. Every tensor and context rank of the
stages that use features computes those of all images of its microbatches.

An image has features on one or more levels. The first take the place of embeddings. Those of level
i > 0, of an earlier layer of the tower, are added to what decoder layer i - 1 returns: DeepStack,
arXiv 2406.04334, in Qwen3-VL.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.formats.hf_folder import other_towers
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from megatron_grpo.config.config import Config
from megatron_grpo.policy.vision_config import has_tower
from parallel import Box
from parallel.groups import Groups
from parallel.images import PackedImages, PromptImages
from parallel.packing import PackedBatch

_PREFIX = "visual."


class VisionTower:
    """Turns the patches of images into features of the text tower's size."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        # They take seconds to import, and only ranks of the first pipeline stages see images.
        from transformers import AutoConfig, AutoImageProcessor, AutoModel  # noqa: PLC0415

        processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._mean, self._std = (
            (torch.tensor(values) / processor.rescale_factor).view(1, -1, 1).to(device)
            for values in (processor.image_mean, processor.image_std)
        )
        config = AutoConfig.from_pretrained(folder).vision_config
        self._tower = AutoModel.from_config(config, dtype=dtype)
        self._tower.load_state_dict(_weights(folder))
        self._tower.to(device).requires_grad_(False)

    @torch.no_grad()
    def features(self, images: PromptImages) -> Tensor:
        """[features, levels, hidden size] of images whose patches are bytes as in the files."""
        patches = images.patches.to(self._mean.device)
        pixels = patches.view(len(patches), self._mean.shape[1], -1)
        normal = ((pixels - self._mean) / self._std).flatten(1)
        grids = images.grids.to(patches.device)
        found = self._tower(normal, grid_thw=grids)
        return torch.stack([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)


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


def vision_tower(
    cfg: Config, shape: ModelShape, groups: Groups, device: torch.device
) -> VisionTower | None:
    """The tower, on ranks that have it."""
    if not has_tower(cfg, shape, groups.coordinates.pipeline):
        return None
    return VisionTower(cfg.model.path, getattr(torch, cfg.model.dtype), device)


def with_features(
    batches: Iterable[PackedBatch], vision: VisionTower | None
) -> Iterator[PackedBatch]:
    """The microbatches of an optimizer batch with the features of their images, on ranks that have
    the tower, in the place of patches; those of a prompt are computed and kept once."""
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
            features = tuple(known[images.digest] for images in batch.images.prompts)
        yield replace(batch, images=replace(batch.images, prompts=(), features=features))


def embedded(chunk: Any, batch: PackedBatch, local: Tensor, groups: Groups) -> Tensor | None:
    """Embeddings of this rank's tokens, with features in the places of images: [t, 1, H].

    None if there are no images, or not the embedding: the chunk then does what it does with text.
    """
    if batch.images is None or not chunk.pre_process:
        return None
    tokens: Tensor = chunk.embedding(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
    )
    return _at_images(batch.images, local, 0, tokens, chunk.config, groups)


def _at_images(
    images: PackedImages, local: Tensor, level: int, elsewhere: Tensor, config: Any, groups: Groups
) -> Tensor:
    """Features of a level at this rank's tokens of images, and `elsewhere` at others: [t, 1, H]."""
    assert images.features is not None, "set by `with_features`"
    rows = images.rows[local]
    if config.sequence_parallel:
        rows = rows.chunk(groups.dims.tensor)[groups.coordinates.tensor]
    features = torch.cat([each[:, level] for each in images.features])[rows.clamp(min=0)]
    chosen = features.to(elsewhere.dtype).unsqueeze(1)
    return torch.where((rows >= 0).view(-1, 1, 1), chosen, elsewhere)


def add_deepstack(chunk: Any, num_layers: int, groups: Groups) -> None:
    """Let those of the model's first `num_layers` that are in the chunk add features."""
    for layer in chunk.decoder.layers:
        if layer.layer_number <= num_layers:  # they count from 1
            # Megatron passes the params to a layer again when it recomputes the whole of it.
            layer.register_forward_hook(partial(_add_features, groups), with_kwargs=True)


def _add_features(
    groups: Groups,
    layer: Any,
    _: tuple[Any, ...],
    passed: dict[str, Any],
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    params = passed["packed_seq_params"]
    if params.images is None:
        return output
    hidden, context = output
    nothing, level = torch.zeros_like(hidden), layer.layer_number
    features = _at_images(params.images, params.local, level, nothing, layer.config, groups)
    return hidden + features, context
