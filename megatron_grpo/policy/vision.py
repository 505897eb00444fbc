"""The vision tower of a multimodal model: transformers' own, with its weights as they are.

Where it is frozen, each image passes through it once: its features are kept with the microbatches
of an optimizer batch for all passes over them. Every tensor and context rank of the stages that use
features computes those of all images of its microbatches.

Where it is trained, it is a module of the first model chunk, and computes features in each pass. To
the pipeline these are inputs, whose gradients are summed over the microbatches of a step. After
these the tensor and context ranks share out the prompts, and each runs one after the other through
the tower and back: the tower is recomputed like a layer, and in that again each of its blocks.

An image has features on one or more levels. The first take the place of embeddings. Those of level
i > 0, of an earlier layer of the tower, are added to what decoder layer i - 1 returns: DeepStack,
arXiv 2406.04334, in Qwen3-VL.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.families.vision import VISION
from checkpoint_convert.formats.tensor_io import StoredTensors
from checkpoint_convert.formats.torch_dtypes import DTYPES
from checkpoint_convert.hf_folder import other_towers
from megatron_grpo.config.config import Config
from megatron_grpo.config.vision import has_tower
from parallel import Box
from parallel.groups import Groups
from parallel.images import PackedImages, PromptImages
from parallel.packing import PackedBatch


class VisionTower:
    """Turns the patches of images into features of the text tower's size."""

    def __init__(self, folder: Path, module: Any, *, is_trained: bool) -> None:
        # It takes seconds to import, and only ranks of the first pipeline stages see images.
        from transformers import AutoImageProcessor  # noqa: PLC0415

        self.is_trained = is_trained
        self._module = module
        self._device = next(module.parameters()).device
        processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._mean, self._std = (
            (torch.tensor(values) / processor.rescale_factor).view(1, -1, 1).to(self._device)
            for values in (processor.image_mean, processor.image_std)
        )
        self._computed: dict[str, tuple[PromptImages, Tensor]] = {}

    @torch.no_grad()
    def features(self, images: PromptImages) -> Tensor:
        """[features, levels, hidden size] of images whose patches are bytes as in the files."""
        return self._forward(images)

    def _forward(self, images: PromptImages) -> Tensor:
        patches = images.patches.to(self._device)
        pixels = patches.view(len(patches), self._mean.shape[1], -1)
        normal = ((pixels - self._mean) / self._std).flatten(1)
        found = self._module(normal, grid_thw=images.grids.to(self._device))
        return torch.stack([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)

    def with_current_features(
        self, batches: Iterable[PackedBatch], *, has_backward: bool
    ) -> list[PackedBatch]:
        """The microbatches of a pass with the features that their images have by now.

        If the pass has a backward, features get a gradient, for `backward`.
        """
        computed: dict[str, tuple[PromptImages, Tensor]] = {}

        def features(images: PromptImages) -> Tensor:
            if images.digest not in computed:
                found = self.features(images)
                if has_backward:
                    # Many tokens may have a feature: their gradients are summed in float32.
                    exact = torch.promote_types(found.dtype, torch.float32)
                    found = found.to(exact).requires_grad_()
                computed[images.digest] = images, found
            return computed[images.digest][1]

        with_features = [*_replaced(batches, features)]
        self._computed = computed if has_backward else {}
        return with_features

    def backward(self, chunk: Any, groups: Groups) -> None:
        """Add the gradient of the tower's weights to those of `chunk`, in which it is.

        After the microbatches' backwards, and before sums over data and context ranks. Collective
        over tensor and context ranks.
        """
        dims, at = groups.dims, groups.coordinates
        context = 1 if groups.is_dynamic else dims.context  # else they have the same microbatches
        num_ranks, rank = dims.tensor * context, at.tensor + dims.tensor * (at.context % context)
        parts = [groups.contexts[context]]  # ranks with other tokens of a microbatch
        if chunk.config.sequence_parallel:
            parts.append(groups.tensor)
        with chunk.no_sync():
            for number, (images, features) in enumerate(self._computed.values()):
                gradient = features.grad
                assert gradient is not None, "of the backward of a microbatch with the images"
                for group in parts:
                    dist.all_reduce(gradient, group=group)
                if number % num_ranks == rank:
                    output = self._forward(images)
                    output.backward(gradient.to(output.dtype))
        self._computed = {}
        for parameter in self._module.parameters():
            if dims.tensor > 1:
                dist.all_reduce(parameter.main_grad, group=groups.tensor)
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)


def vision_tower(cfg: Config, shape: ModelShape, groups: Groups, chunk: Any) -> VisionTower | None:
    """The tower, on ranks that have it; `chunk` is the first of this rank's GPTModels."""
    if not has_tower(cfg, shape, groups.coordinates.pipeline):
        return None
    if not shape.vision:
        module = _new_module(cfg, next(chunk.parameters()).device)
        module.load_state_dict(_weights(cfg.model.path))
        return VisionTower(cfg.model.path, module.requires_grad_(False), is_trained=False)
    tower = VisionTower(cfg.model.path, chunk.visual, is_trained=True)
    finalize = chunk.config.finalize_model_grads_func

    def with_tower(chunks: Any, *args: Any, **options: Any) -> None:
        tower.backward(chunks[0], groups)
        finalize(chunks, *args, **options)

    chunk.config.finalize_model_grads_func = with_tower
    return tower


def add_tower(chunk: Any, cfg: Config) -> None:
    """Make the tower a module of the first chunk, which is trained with its weights."""
    chunk.visual = _new_module(cfg, next(chunk.parameters()).device)
    # First of its modules: gradients are reduced in the opposite order, and these come last.
    modules = {"visual": chunk.visual, **chunk._modules}
    chunk._modules.clear()
    chunk._modules.update(modules)
    # All that blocks keep of an image can be more than a microbatch of text needs.
    chunk.visual.gradient_checkpointing_enable({"use_reentrant": False})


def _new_module(cfg: Config, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    config = AutoConfig.from_pretrained(cfg.model.path).vision_config
    return AutoModel.from_config(config, dtype=getattr(torch, cfg.model.dtype)).to(device)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Weights of the tower, by its own names."""
    _, others = other_towers(folder)
    places = {name: place for name, place in others.items() if name.startswith(VISION)}
    weights = {}
    with closing(StoredTensors(places)) as stored:
        for name, place in places.items():
            values = torch.empty(place.shape, dtype=DTYPES[place.dtype])
            stored.read_into(name, Box.whole(place.shape), values)
            weights[name.removeprefix(VISION)] = values
    return weights


def with_features(
    batches: Iterable[PackedBatch], vision: VisionTower | None
) -> Iterator[PackedBatch]:
    """The microbatches of an optimizer batch with the features of their images, on ranks that have
    the tower, in the place of patches; those of a prompt are computed and kept once.

    Patches stay for a tower that is trained: see `VisionTower.with_current_features`.
    """
    if vision is None:
        return _replaced(batches, None)
    if vision.is_trained:
        return iter(batches)
    known: dict[str, Tensor] = {}

    def features(images: PromptImages) -> Tensor:
        if images.digest not in known:
            known[images.digest] = vision.features(images)
        return known[images.digest]

    return _replaced(batches, features)


def _replaced(
    batches: Iterable[PackedBatch], features_of: Callable[[PromptImages], Tensor] | None
) -> Iterator[PackedBatch]:
    """The microbatches with features, or None, in the place of patches."""
    for batch in batches:
        if batch.images is None:
            yield batch
            continue
        features = None if features_of is None else tuple(map(features_of, batch.images.prompts))
        yield replace(batch, images=replace(batch.images, prompts=(), features=features))


def embedded(chunk: Any, batch: PackedBatch, local: Tensor, groups: Groups) -> Tensor:
    """Embeddings of this rank's tokens, with features in the places of images: [t, 1, H].

    Of a microbatch with images, and a chunk with the embedding.
    """
    assert batch.images is not None
    tokens: Tensor = chunk.embedding(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
    )
    return _at_images(batch.images, local, 0, tokens, chunk.config, groups)


def _at_images(
    images: PackedImages, local: Tensor, level: int, elsewhere: Tensor, config: Any, groups: Groups
) -> Tensor:
    """Features of a level at this rank's tokens of images, and `elsewhere` at others: [t, 1, H]."""
    assert images.features is not None, "set by `with_features` or `with_current_features`"
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
