"""What config.json says of the features of images: names and integers, without torch."""

from collections.abc import Sequence
from pathlib import Path

from checkpoint_convert import ModelShape
from checkpoint_convert.folder import read_json
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from parallel import pipeline_layers


def mrope_axes(cfg: Config) -> Sequence[int]:
    """Whether each of RoPE's frequencies rotates by a token's position in time (0), height (1) or
    width (2); none if prompts have no images, and all three are equal."""
    if cfg.data.image_column is None:
        return ()
    file = Path(cfg.model.path) / "config.json"
    text = text_config(file, read_json(file))
    rope = text.get("rope_scaling") or text["rope_parameters"]
    sections: list[int] = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    # They take turns, and time goes on alone where the others have as many as they should.
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]


def num_deepstack_layers(cfg: Config) -> int:
    """How many decoder layers have features added to what they return."""
    if cfg.data.image_column is None:
        return 0
    config = read_json(Path(cfg.model.path) / "config.json")
    return len(config.get("vision_config", {}).get("deepstack_visual_indexes", ()))


def has_tower(cfg: Config, shape: ModelShape, stage: int) -> bool:
    """Whether ranks of a pipeline stage have the tower: those with the embedding, or with a layer
    that features are added to, if prompts have images."""
    first, *_ = pipeline_layers(shape.num_layers, cfg.dims)[stage]
    return cfg.data.image_column is not None and first.start < max(1, num_deepstack_layers(cfg))
