"""The vision tower of a multimodal model: transformers' own module, with the files' names.

A frozen tower sees each image of an optimizer batch once: the features stay with the microbatches
for all passes. Every tensor and context rank of the stages that use features computes the features
of all images in its microbatches.

A trained tower is a module of the first model chunk, and computes features in each pass. To the
pipeline, features are inputs with gradients, summed over the microbatches of a step. Then tensor
and context ranks share out the prompts, and run each through the tower and back: the tower is
recomputed like a layer, and within that each of its blocks again.

An image has features on one or more levels. Level 0 takes the place of embeddings; level i > 0, of
an earlier layer of the tower, is added to the output of decoder layer i - 1 (DeepStack, arXiv
2406.04334, in Qwen3-VL).
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
    """Turns patches of images into features [features, levels, hidden size] of the text tower."""

    def __init__(self, folder: Path, module: Any, *, is_trained: bool) -> None:
        # transformers takes seconds to import, and only the first pipeline stages see images.
        from transformers import AutoImageProcessor  # noqa: PLC0415

        self.is_trained = is_trained
        self._module = module
        self._device = next(module.parameters()).device
        processor: Any = AutoImageProcessor.from_pretrained(folder)
        # Patches are bytes: (x rescale - mean) / std = (x - mean / rescale) / (std / rescale).
        self._mean, self._std = (
            (torch.tensor(values) / processor.rescale_factor).view(1, -1, 1).to(self._device)
            for values in (processor.image_mean, processor.image_std)
        )
        self._computed: dict[tuple[str, ...], tuple[PromptImages, Tensor]] = {}

    @torch.no_grad()
    def features(self, images: PromptImages) -> Tensor:
        """Features [features, levels, hidden size] without gradient, from patches in bytes."""
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
        """Replace patches by features under the current weights, for one pass of a trained tower.

        If the pass has a backward, features get a gradient, for `backward`.
        """
        computed: dict[tuple[str, ...], tuple[PromptImages, Tensor]] = {}

        def features(images: PromptImages) -> Tensor:
            if images.digests not in computed:
                found = self.features(images)
                if has_backward:
                    # Completions of a prompt share its features: sum their gradients in float32.
                    exact = torch.promote_types(found.dtype, torch.float32)
                    found = found.to(exact).requires_grad_()
                computed[images.digests] = images, found
            return computed[images.digests][1]

        with_features = [*_replaced(batches, features)]
        self._computed = computed if has_backward else {}
        return with_features

    def backward(self, chunk: Any, groups: Groups) -> None:
        """Add the gradient of the tower's weights to the buffers of `chunk`, which contains it.

        Call it after the backwards of all microbatches, before sums over data and context ranks.
        Collective over tensor and context ranks.
        """
        dims, at = groups.dims, groups.coordinates
        # Dynamic context ranks have different microbatches, others share them.
        context = 1 if groups.is_dynamic else dims.context
        num_ranks, rank = dims.tensor * context, at.tensor + dims.tensor * (at.context % context)
        parts = [groups.contexts[context]]  # ranks with other tokens of a microbatch
        if chunk.config.sequence_parallel:
            parts.append(groups.tensor)
        # Hooks of DistributedDataParallel would count a backward per prompt as ready gradients, and
        # some ranks have no prompt: every parameter is reported ready once, below.
        with chunk.no_sync():
            for number, (images, features) in enumerate(self._computed.values()):
                gradient = features.grad
                assert gradient is not None, "set by the backward of a microbatch"
                for group in parts:
                    dist.all_reduce(gradient, group=group)
                if number % num_ranks == rank:
                    output = self._forward(images)
                    output.backward(gradient.to(output.dtype))
        self._computed = {}
        for parameter in self._module.parameters():
            if dims.tensor > 1:  # ranks ran different prompts; DDP sums over data and context ranks
                dist.all_reduce(parameter.main_grad, group=groups.tensor)
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)


def vision_tower(cfg: Config, shape: ModelShape, groups: Groups, chunk: Any) -> VisionTower | None:
    """Build the tower on ranks that use features; `chunk`: this rank's first GPTModel."""
    if not has_tower(cfg, shape, groups.coordinates.pipeline):
        return None
    if not shape.vision:
        module = _new_module(cfg, next(chunk.parameters()).device)
        module.load_state_dict(_weights(cfg.model.path))
        return VisionTower(cfg.model.path, module.requires_grad_(False), is_trained=False)
    tower = VisionTower(cfg.model.path, chunk.visual, is_trained=True)
    # Megatron's function for the end of a step reduces gradients: the tower's must be there.
    finalize = chunk.config.finalize_model_grads_func

    def with_tower(chunks: Any, *args: Any, **options: Any) -> None:
        tower.backward(chunks[0], groups)
        finalize(chunks, *args, **options)

    chunk.config.finalize_model_grads_func = with_tower
    return tower


def add_tower(chunk: Any, cfg: Config) -> None:
    """Make the tower a module of the first chunk, to be trained with the chunk's weights."""
    chunk.visual = _new_module(cfg, next(chunk.parameters()).device)
    # First of the modules: buckets fill in reverse order, and the tower's gradients come last.
    modules = {"visual": chunk.visual, **chunk._modules}
    chunk._modules.clear()
    chunk._modules.update(modules)
    # Activations of all blocks for one image can exceed the activations of a microbatch of text.
    chunk.visual.gradient_checkpointing_enable({"use_reentrant": False})


def _new_module(cfg: Config, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    config = AutoConfig.from_pretrained(cfg.model.path).vision_config
    return AutoModel.from_config(config, dtype=getattr(torch, cfg.model.dtype)).to(device)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Weights of the tower, by the names of its module."""
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
    """Replace patches by features in an optimizer batch; each prompt's are computed and kept once.

    On ranks without a tower, drop the patches. Keep them for a trained tower: see
    `VisionTower.with_current_features`.
    """
    if vision is None:
        return _replaced(batches, None)
    if vision.is_trained:
        return iter(batches)
    known: dict[tuple[str, ...], Tensor] = {}

    def features(images: PromptImages) -> Tensor:
        if images.digests not in known:
            known[images.digests] = vision.features(images)
        return known[images.digests]

    return _replaced(batches, features)


def _replaced(
    batches: Iterable[PackedBatch], features_of: Callable[[PromptImages], Tensor] | None
) -> Iterator[PackedBatch]:
    """Microbatches with features, or None, in the place of patches."""
    for batch in batches:
        if batch.images is None:
            yield batch
            continue
        features = None if features_of is None else tuple(map(features_of, batch.images.prompts))
        yield replace(batch, images=replace(batch.images, prompts=(), features=features))


def embedded(chunk: Any, batch: PackedBatch, local: Tensor, groups: Groups) -> Tensor:
    """Embeddings [t, 1, H] of this rank's tokens, with features in the places of images.

    `chunk` has the embedding, and `batch` images.
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
    """[t, 1, H]: features of a level at this rank's tokens of images, else `elsewhere`."""
    assert images.features is not None, "set by `with_features` or `with_current_features`"
    rows = images.rows[local]
    if config.sequence_parallel:
        rows = rows.chunk(groups.dims.tensor)[groups.coordinates.tensor]
    features = torch.cat([each[:, level] for each in images.features])[rows.clamp(min=0)]
    chosen = features.to(elsewhere.dtype).unsqueeze(1)
    return torch.where((rows >= 0).view(-1, 1, 1), chosen, elsewhere)


def add_deepstack(chunk: Any, num_layers: int, groups: Groups) -> None:
    """Let the model's first `num_layers` layers, as far as they are in the chunk, add features."""
    for layer in chunk.decoder.layers:
        if layer.layer_number <= num_layers:  # Megatron counts layers from 1
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
