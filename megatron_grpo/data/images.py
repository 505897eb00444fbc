"""The images of a row: what they add to its prompt, and the patches that towers take of them.

Pixels are made here once, by the model's own processor, for trainer and engines alike. Those of a
whole data set would not fit into memory, so that a prompt has its images as they are in the data.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_convert.hf_config import read_json
from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.reward import REWARD_MODEL
from megatron_grpo.data.rows import Fault, Row

if TYPE_CHECKING:
    from PIL.Image import Image

    from parallel.images import PromptImages

FAMILY = "qwen2_5_vl"
BASE64 = "data:image/"
ImageSource = Path | bytes
"""An image file, or what is in it."""


def images_of(data: DataConfig, row: Row) -> list[ImageSource] | Fault:
    """The images of a row; none if the column is null or an empty list."""
    found = row.get(data.image_column) if data.image_column else None
    images = [_image(each, data) for each in (found if isinstance(found, list) else [found])]
    faults = [each for each in images if isinstance(each, Fault)]
    if found is None or not faults:
        return [each for each in images if isinstance(each, ImageSource)]
    return faults[0]


def _image(value: Any, data: DataConfig) -> ImageSource | Fault:
    if isinstance(value, dict):  # as in tables of Hugging Face data sets
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        kind = f"{data.image_column!r} is neither a path nor bytes of an image, nor a list of them"
        return Fault(kind, type(value).__name__)
    if value.startswith(("http://", "https://")):
        return Fault(f"{data.image_column!r} is a URL: download the image and give its path", value)
    if value.startswith(BASE64):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            return Fault(f"{data.image_column!r} is not base64", str(error))
    path = Path(str(data.path))
    return (path if path.is_dir() else path.parent) / value


def _open(image: ImageSource) -> "Image":
    """An image the right way up, of which only a file's head is read until its pixels are."""
    from PIL import Image, ImageOps  # noqa: PLC0415

    opened: Image.Image = Image.open(BytesIO(image) if isinstance(image, bytes) else image)
    ImageOps.exif_transpose(opened, in_place=True)
    return opened


class ImageReader:
    """The image processor of a model."""

    def __init__(self, cfg: Config) -> None:
        # Takes seconds to import, and only prompts with images need it.
        from transformers import AutoImageProcessor  # noqa: PLC0415

        self.token_id: int = read_json(cfg.model.path / "config.json")["image_token_id"]
        self.most: int = cfg.rollout.vllm["limit_mm_per_prompt"]["image"]
        self._processor: Any = AutoImageProcessor.from_pretrained(cfg.model.path)
        self._merge: int = self._processor.merge_size

    @classmethod
    def of(cls, cfg: Config) -> "ImageReader | None":
        """That of a run; None if its prompts have no images."""
        return cls(cfg) if cfg.data.image_column else None

    def expand(
        self, token_ids: Sequence[int], images: Sequence[ImageSource]
    ) -> "tuple[list[int], PromptSources] | Fault":
        """The tokens of a prompt with one for each feature of its images, and where these begin.

        `token_ids` has one token for each image, as chat templates write it.
        """
        if (num_tokens := token_ids.count(self.token_id)) != len(images):
            return Fault(
                "the prompt has another number of image tokens than the row has images",
                f"{num_tokens} instead of {len(images)}",
            )
        if len(images) > self.most:
            return Fault(
                "more images than rollout.vllm.limit_mm_per_prompt.image",
                f"{len(images)} of at most {self.most}",
            )
        sizes = []
        for image in images:
            try:
                width, height = _open(image).size
                sizes.append(self._processor.get_number_of_image_patches(height, width))
            except (OSError, ValueError) as error:  # also for sides that are too unequal
                return Fault("an image cannot be read", str(error))
        expanded: list[int] = []
        starts: list[int] = []
        for token in token_ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            num_features = sizes[len(starts)] // self._merge**2
            starts.append(len(expanded))
            expanded += [token] * num_features
        return expanded, PromptSources(tuple(images), tuple(starts), len(expanded), self)

    def read(self, images: "PromptSources") -> "PromptImages":
        """The patches of the images, as bytes: whoever takes them scales and shifts them."""
        import torch  # noqa: PLC0415

        from parallel.images import PromptImages, prompt_positions  # noqa: PLC0415

        made = self._processor(
            images=[_open(image).convert("RGB") for image in images.images],
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        patches, grids = made["pixel_values"].to(torch.uint8), made["image_grid_thw"]
        sizes = [(t, h // self._merge, w // self._merge) for t, h, w in grids.tolist()]
        ends = [s + t * h * w for s, (t, h, w) in zip(images.starts, sizes, strict=True)]
        digest = hashlib.blake2b(patches.numpy().tobytes() + grids.numpy().tobytes())
        return PromptImages(
            patches=patches,
            grids=grids,
            digest=digest.hexdigest(),
            tokens=torch.cat(
                [torch.arange(*each) for each in zip(images.starts, ends, strict=True)]
            ),
            positions=prompt_positions(images.num_tokens, images.starts, sizes),
        )


@dataclass(frozen=True)
class PromptSources:
    """The images of a prompt as they are in the data."""

    images: tuple[ImageSource, ...]
    starts: tuple[int, ...]
    """Where the tokens of each begin in the prompt."""
    num_tokens: int
    """Of the prompt."""
    reader: ImageReader = field(repr=False, compare=False)

    @property
    def key(self) -> bytes:
        """What tells these images from others, if files do not change."""
        parts = (each if isinstance(each, bytes) else str(each).encode() for each in self.images)
        return b"".join(hashlib.blake2b(part).digest() for part in parts)

    def read(self) -> "PromptImages":
        """Read them, and make patches of them."""
        return self.reader.read(self)


def check_images(cfg: Config) -> None:
    """Raise ValueError for what does not go with prompts that have images."""
    columns = {"data.image_column": cfg.data.image_column} | {
        f"eval.{name}.data.image_column": held_out.data.image_column
        for name, held_out in cfg.eval.named_sets.items()
        if held_out.data
    }
    key = next((key for key, column in columns.items() if column), None)
    if key is None:
        return
    if cfg.data.image_column is None:
        raise ValueError(f"{key} needs data.image_column, too: the run itself has no images")
    kind = read_json(cfg.model.path / "config.json").get("model_type")
    if kind != FAMILY:
        raise ValueError(
            f"{key}: model.path is a {kind}, and images are supported of {FAMILY} only: leave it "
            "out"
        )
    limits = cfg.rollout.vllm.get("limit_mm_per_prompt")
    if not isinstance(limits, dict) or not limits.get("image") or limits != {**limits, "video": 0}:
        raise ValueError(
            f"{key} needs engines that take images: set rollout.vllm.limit_mm_per_prompt="
            "{image: 1, video: 0}, with the most images of one prompt"
        )
    refused = {
        "data.apply_chat_template false": not cfg.data.apply_chat_template,
        "an environment or an agent": cfg.has_dialogues,
        "rollout.enable_sleep_mode true": cfg.rollout.enable_sleep_mode,
        "rollout.vllm.load_format dummy": cfg.rollout.vllm.get("load_format") == "dummy",
        "rollout.vllm.speculative_config": "speculative_config" in cfg.rollout.vllm,
        "a reward_model": any(
            each.name == REWARD_MODEL
            for reward in cfg.rewards.values()
            for each in reward.functions
        ),
    }
    if told := [name for name, is_used in refused.items() if is_used]:
        raise ValueError(f"{key} does not go with {told[0]} yet: leave out one of the two")
