"""Images of rows: their tokens in prompts, and their patches for vision towers.

The model's own processor makes the pixels, once for trainer and engines alike. Prompts keep images
as they are in the data, since the pixels of a whole data set would not fit into memory.
"""

import base64
import hashlib
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoint_convert import read_shape
from checkpoint_convert.families.multimodal import WITH_IMAGES
from checkpoint_convert.folder import read_json
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.rows import BASE64, Fault, Row

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from parallel.images import PromptImages


LIMITS = {
    "vllm": ("limit_mm_per_prompt", {"video": 0}),
    "sglang": ("limit_mm_data_per_request", {}),
}
"""By engine: the argument with the maximum of images per prompt, and its other required entries."""
WIDE_MODES = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel, which conversion would cut to 8."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = 200  # a path is shown whole, and base64 is not


@dataclass(frozen=True)
class ImageSource:
    """An image of a row."""

    name: str
    """Path as in the row, or a description such as `image 2 of the row`."""
    content: Path | bytes
    """An image file, or its bytes."""

    @property
    def shown(self) -> str:
        return self.name if isinstance(self.content, bytes) else _SHORT.repr(self.name)

    @property
    def key(self) -> bytes:
        """Digest of the bytes, or of the file's name: folders may move, but files do not change."""
        own = self.content if isinstance(self.content, bytes) else self.name.encode()
        return hashlib.blake2b(own).digest()

    @property
    def data_url(self) -> str:
        """The file in base64, as OpenAI's API takes it. Raises OSError if it is no image."""
        content = self.content
        with _named(self) as opened:
            kind = opened.get_format_mimetype()
            encoded = base64.b64encode(
                content if isinstance(content, bytes) else content.read_bytes()
            )
        return f"data:{kind};base64,{encoded.decode()}"


def image_limits(rollout: RolloutConfig) -> tuple[str, Any]:
    """Key of the maximum images per prompt, and its value."""
    name, _ = LIMITS[rollout.engine]
    return f"rollout.{rollout.engine}.{name}", getattr(rollout, rollout.engine).get(name)


def images_of(data: DataConfig, row: Row) -> list[ImageSource] | Fault:
    """Find the images of a row; none if the column is null or an empty list."""
    found = row.get(data.image_column) if data.image_column else None
    if found is None:
        return []
    values = found if isinstance(found, list) else [found]
    images = [_image(each, f"image {i + 1} of the row", data) for i, each in enumerate(values)]
    faults = [each for each in images if isinstance(each, Fault)]
    return faults[0] if faults else [each for each in images if isinstance(each, ImageSource)]


def _image(value: Any, name: str, data: DataConfig) -> ImageSource | Fault:
    if isinstance(value, dict):  # as in tables of Hugging Face data sets
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return ImageSource(name, value)
    if not isinstance(value, str):
        kind = f"{data.image_column!r} is neither a path nor bytes of an image, nor a list of them"
        return Fault(kind, f"{name}: {type(value).__name__}")
    if value.startswith(("http://", "https://")):
        kind = f"{data.image_column!r} is a URL: download the image and give its path"
        return Fault(kind, _SHORT.repr(value))
    if value.startswith(BASE64):
        try:
            return ImageSource(name, base64.b64decode(value.partition(",")[2], validate=True))
        except ValueError as error:
            return Fault(f"{data.image_column!r} is not base64", f"{name}: {error}")
    path = Path(str(data.path))
    return ImageSource(value, (path if path.is_dir() else path.parent) / value)


@contextmanager
def _named(image: ImageSource) -> "Iterator[ImageFile]":
    """Open an image; its pixels are read on first use. OSErrors of the block name the image."""
    from PIL import Image  # noqa: PLC0415

    content = image.content
    try:
        with Image.open(BytesIO(content) if isinstance(content, bytes) else content) as opened:
            yield opened
    # Pillow raises all of these for bad files; sides that are too unequal are a ValueError, too.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None)  # of a path, and without it
        if reason and not Path(image.name).suffix:
            reason += "; base64 begins with data:image/png;base64,"
        raise OSError(f"{image.shown}: {reason or error}") from error


def _pixels(opened: "Image") -> "Image":
    """Convert to RGB, the right way up; transparent pixels become white, as in vLLM."""
    from PIL import Image, ImageOps  # noqa: PLC0415

    upright = ImageOps.exif_transpose(opened)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    seen = upright.convert("RGBA")
    pixels = Image.new("RGB", seen.size, "white")
    pixels.paste(seen, mask=seen.getchannel("A"))
    return pixels


@cache
def image_processor(folder: Path) -> Any:
    # Takes seconds to import, and only processes that see images need it.
    from transformers import AutoImageProcessor  # noqa: PLC0415

    return AutoImageProcessor.from_pretrained(folder)


class ImageReader:
    """Reads images for a model. Picklable, so it can be sent to other processes of the run."""

    def __init__(self, cfg: Config) -> None:
        self._folder = cfg.model.path
        self.token_id: int = read_json(self._folder / "config.json")["image_token_id"]
        self.limit, limits = image_limits(cfg.rollout)
        self.most: int = limits["image"]

    @classmethod
    def of(cls, cfg: Config) -> "ImageReader | None":
        """Reader of a run's images; None if its prompts have none."""
        return cls(cfg) if cfg.data.image_column else None

    def expand(
        self, token_ids: Sequence[int], images: Sequence[ImageSource]
    ) -> "tuple[list[int], PromptSources | None] | Fault":
        """Repeat the token of each image once per feature, and note where each image begins.
        `token_ids` has one token per image, as chat templates write it."""
        if (num_tokens := token_ids.count(self.token_id)) != len(images):
            return Fault(
                "the prompt's number of image tokens is not the row's number of images",
                f"{num_tokens} instead of {len(images)}",
            )
        if len(images) > self.most:
            return Fault(
                f"more images than {self.limit}.image", f"{len(images)} of at most {self.most}"
            )
        counts = []
        for image in images:
            try:
                with _named(image) as opened:
                    counts.append(self._num_tokens(opened))
            except OSError as error:
                return Fault("an image cannot be read", str(error))
        sources = PromptSources(tuple(images), tuple(counts), self)
        return sources.placed(sources.expand(token_ids, range(len(images))))

    def _num_tokens(self, opened: "Image") -> int:
        """Count the tokens from the header. EXIF's rotation swaps sides, which keeps the count."""
        if opened.mode.startswith(WIDE_MODES):
            raise ValueError(f"pixels of mode {opened.mode}: save it with 8 bits per channel")
        processor = image_processor(self._folder)
        num_patches: int = processor.get_number_of_image_patches(opened.height, opened.width)
        return num_patches // processor.merge_size**2

    def read(self, images: "PromptSources") -> "PromptImages":
        """Make the patches of the images, as bytes; the receiver scales and shifts them. Raises
        OSError for a damaged file, or one that has changed since its tokens were counted."""
        import torch  # noqa: PLC0415

        from parallel.images import PromptImages, prompt_positions  # noqa: PLC0415

        pixels, tokens = [], []
        for number, start in images.places:
            count = images.counts[number]
            tokens.append(torch.arange(start, start + count))
            with _named(images.images[number]) as opened:
                if (num_tokens := self._num_tokens(opened)) != count:
                    raise ValueError(
                        f"it has {num_tokens} tokens now, and had {count} when the prompts were "
                        "made: start again with files that do not change"
                    )
                pixels.append(_pixels(opened))
        processor = image_processor(self._folder)
        # Neither scaled nor normalized: floats would take four times the bytes to every rank.
        made = processor(images=pixels, do_rescale=False, do_normalize=False, return_tensors="pt")
        patches, grids = made["pixel_values"].to(torch.uint8), made["image_grid_thw"]
        merge = processor.merge_size
        sizes = [(t, h // merge, w // merge) for t, h, w in grids.tolist()]
        parts = zip(patches.split(grids.prod(dim=1).tolist()), grids, strict=True)
        return PromptImages(
            patches=patches,
            grids=grids,
            digests=tuple(
                hashlib.blake2b(own.numpy().tobytes() + grid.numpy().tobytes()).hexdigest()
                for own, grid in parts
            ),
            tokens=torch.cat(tokens),
            # Up to the end of the last image: what follows is text.
            positions=prompt_positions(
                int(tokens[-1][-1]) + 1, [start for _, start in images.places], sizes
            ),
        )


@dataclass(frozen=True)
class PromptSources:
    """The images of a row as they are in the data, and their places in a sequence."""

    images: tuple[ImageSource, ...]
    counts: tuple[int, ...]
    """Tokens of each image."""
    reader: ImageReader = field(repr=False, compare=False)
    places: tuple[tuple[int, int], ...] = ()
    """(index in `images`, position of its first token), by position; an agent may leave out images
    and repeat others."""

    @property
    def shown(self) -> str:
        return ", ".join(each.shown for each in self.images)

    @property
    def key(self) -> bytes:
        return b"".join(each.key for each in self.images)

    def read(self) -> "PromptImages":
        return self.reader.read(self)

    def expand(self, token_ids: Sequence[int], numbers: Iterable[int]) -> list[int]:
        """Replace the k-th image token by the tokens of image `numbers[k]`, which are -1 - i for
        image i: token ids would be equal for images of one size."""
        following = iter(numbers)
        expanded: list[int] = []
        for token in token_ids:
            if token == self.reader.token_id:
                number = next(following)
                expanded += [-1 - number] * self.counts[number]
            else:
                expanded.append(token)
        return expanded

    def placed(self, expanded: Sequence[int]) -> "tuple[list[int], PromptSources | None]":
        """Token ids of an expanded sequence, and its images with their places; None without any."""
        tokens = np.array(expanded, np.int32)
        of_images = np.flatnonzero(tokens < 0)
        places, row = list[tuple[int, int]](), 0
        while row < len(of_images):
            number, at = -1 - int(tokens[of_images[row]]), int(of_images[row])
            places.append((number, at))
            row += self.counts[number]
        tokens[of_images] = self.reader.token_id
        return tokens.tolist(), replace(self, places=tuple(places)) if places else None

    def within(self, num_tokens: int) -> tuple[ImageSource, ...]:
        """The images that begin in the first `num_tokens` of the sequence, in order."""
        return tuple(self.images[i] for i, at in self.places if at < num_tokens)

    def cut_out(self, bounds: Iterable[tuple[int, int]]) -> "PromptSources | None":
        """The images that begin in the parts (start, end) of the sequence, laid end to end."""
        places, first = list[tuple[int, int]](), 0
        for start, end in bounds:
            places += [(i, first + at - start) for i, at in self.places if start <= at < end]
            first += end - start
        return replace(self, places=tuple(places)) if places else None


def read_images[T](
    prompts: Iterable[PromptSources | None], made_of: Callable[["PromptImages"], T]
) -> dict[PromptSources | None, T]:
    """Map the sources of each prompt to `made_of` its images. Equal sources are read once."""
    different = [*dict.fromkeys(filter(None, prompts))]
    if not different:
        return {}
    # Threads suffice: decoding, resizing and hashing release the interpreter's lock.
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        made = threads.map(lambda images: made_of(images.read()), different)
        return dict(zip(different, made, strict=True))


def check_images(cfg: Config) -> None:
    """Raise ValueError if the model or the engine cannot take prompts with images."""
    if cfg.data.image_column is None:
        return
    key = "data.image_column"
    _check_model(key, cfg.model.path / "config.json")
    engine = cfg.rollout.engine
    if engine not in LIMITS:
        raise ValueError(
            f"{key} needs engines that take images, and rollout.engine is {engine}: use "
            f"{' or '.join(LIMITS)}"
        )
    (limit, limits), (_, others) = image_limits(cfg.rollout), LIMITS[engine]
    most = limits.get("image") if isinstance(limits, dict) else None
    # By `type`, as true is an instance of int, too.
    if type(most) is not int or most < 1 or limits != {"image": most, **others}:
        legal = ", ".join(f"{name}: {value}" for name, value in {"image": 1, **others}.items())
        raise ValueError(
            f"{key} needs engines that take images, and {limit} is {limits}: set it to "
            f"{{{legal}}}, with the most images of one prompt"
        )


def _check_model(key: str, file: Path) -> None:
    """Raise ValueError if the model takes no images, or takes them in an unknown way."""
    config = read_json(file)
    kind = config.get("model_type")
    if kind not in WITH_IMAGES:
        raise ValueError(
            f"{key}: model.path is a {kind}, and images are supported for {', '.join(WITH_IMAGES)} "
            "only: leave it out"
        )
    images, text = WITH_IMAGES[kind], text_config(file, config)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections, half = rope.get("mrope_section"), read_shape(file.parent).rotary_dim // 2
    if not (
        isinstance(sections, list)
        and [type(size) for size in sections] == [int] * 3
        and sum(sections) == half
        and rope.get("mrope_interleaved", False) is images.alternates_axes
    ):
        raise ValueError(
            f"{file}: RoPE of a {kind} needs mrope_section with three sizes whose sum is {half}, "
            f"and mrope_interleaved {images.alternates_axes}; it is {rope}"
        )
    levels = (config.get("vision_config") or {}).get("deepstack_visual_indexes")
    if images.has_levels and type(levels) is not list:
        raise ValueError(
            f"{file}: deepstack_visual_indexes of vision_config is {levels}: write down a list"
        )
