"""Prompts with images in an SGLang engine, without its own code for reading images.

Requests bring the trainer's patches, and one token for each feature (`image_features` in
request.py). Patches travel to the workers as bytes; the vision tower scales and shifts them there.
"""

from base64 import b64decode
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from torch import Tensor
from torch.nn import Module

from megatron_grpo.engine_weights.protocol import Json
from parallel.images import prompt_positions


class PromptReader:
    """Converts requests with images for SGLang's schedulers, in place of its own processors."""

    prefer_tokenized_input = True
    """SGLang's name: `process_mm_data_async` gets tokens, not text."""

    def __init__(self, config: Any) -> None:
        self._token_id: int = config.image_token_id
        self._merge: int = config.vision_config.spatial_merge_size

    async def process_mm_data_async(
        self, *, image_data: Sequence[Json], input_text: list[int], **others: Any
    ) -> MultimodalProcessorOutput:
        """SGLang's method: `image_data` are the `features` of a request, `input_text` its tokens,
        sampled ones included if it was cut."""
        [features] = image_data
        parts = (features[key]["image"] for key in ("kwargs_data", "mm_hashes", "mm_placeholders"))
        items = [_item(*part) for part in zip(*parts, strict=True)]
        grids = [item.image_grid_thw[0].tolist() for item in items]
        sizes = [(times, h // self._merge, w // self._merge) for times, h, w in grids]
        starts = [item.offsets[0][0] for item in items]
        positions = prompt_positions(len(input_text), starts, sizes)
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=input_text,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(input_text, items),
            im_token_id=self._token_id,
            mrope_positions=positions,
            # Text after an image continues from the largest position, not from the token count.
            mrope_position_delta=positions.max().view(1, 1) + 1 - len(input_text),
        )

    def clear_preprocess_cache(self) -> None:
        """SGLang's method: nothing is kept."""

    def shutdown(self) -> None:
        """SGLang's method: nothing runs."""


def _item(encoded: str, digest: str, place: Json) -> MultimodalDataItem:
    """An image; `digest`, the hash of pixels and sizes, identifies it in the prefix cache."""
    tensors = msgspec.msgpack.decode(b64decode(encoded))
    start, count = place["offset"], place["length"]
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=_tensor(*tensors["pixel_values"]["data"]),
        offsets=[(start, start + count - 1)],
        model_specific_data={"image_grid_thw": _tensor(*tensors["image_grid_thw"]["data"])[None]},
    )
    item.set_identity(2 * bytes.fromhex(digest))  # SGLang wants 32 bytes, and hashes them
    return item


def _tensor(dtype: str, size: list[int], raw: msgspec.msgpack.Ext) -> Tensor:
    values = torch.frombuffer(bytearray(raw.data), dtype=getattr(torch, dtype))
    assert len(values) == prod(size), f"{len(values)} values for {size}"
    return values.view(size)


def scale(folder: str) -> Callable[[Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that normalises bytes by the image processor in `folder`, with the operations of the
    trainer's `VisionTower`."""
    from transformers import AutoImageProcessor  # noqa: PLC0415 - takes seconds

    processor = AutoImageProcessor.from_pretrained(folder)
    mean, std = (
        (torch.tensor(values) / processor.rescale_factor).view(1, -1, 1)
        for values in (processor.image_mean, processor.image_std)
    )

    def scaled(tower: Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        patches, *others = arguments
        # SGLang has cast the bytes to the tower's dtype: bfloat16 holds all integers up to 256.
        pixels = patches.float().view(len(patches), mean.shape[1], -1)
        normal = (pixels - mean.to(pixels.device)) / std.to(pixels.device)
        return normal.flatten(1), *others

    return scaled


def forget_features() -> None:
    """Drop a worker's cached features of images, which an earlier vision tower computed."""
    mm_schedule.embedding_cache.clear()
