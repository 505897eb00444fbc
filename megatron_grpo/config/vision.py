"""The vision tower and the features of images, by the config and the model's config.json."""

from collections.abc import Sequence
from pathlib import Path

from checkpoint_convert import ModelShape
from checkpoint_convert.families.multimodal import WITH_IMAGES
from checkpoint_convert.families.vision import vision_tensors
from checkpoint_convert.folder import read_json
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from parallel import pipeline_layers
from parallel.words import counted


def mrope_axes(cfg: Config) -> Sequence[int]:
    """Axis of each RoPE frequency: a token's position in time (0), height (1) or width (2). Empty
    for prompts without images, where all three positions are equal."""
    if cfg.data.image_column is None:
        return ()
    file = Path(cfg.model.path) / "config.json"
    text = text_config(file, read_json(file))
    rope = text.get("rope_scaling") or text["rope_parameters"]
    sections: list[int] = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    # The axes alternate 0, 1, 2. Once height or width has its frequencies, time takes its turns.
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]


def num_deepstack_layers(cfg: Config) -> int:
    """Number of decoder layers with image features added to their output (DeepStack)."""
    if cfg.data.image_column is None:
        return 0
    config = read_json(Path(cfg.model.path) / "config.json")
    return len(config.get("vision_config", {}).get("deepstack_visual_indexes") or ())


def has_tower(cfg: Config, shape: ModelShape, stage: int) -> bool:
    """Whether ranks of pipeline stage `stage` have the tower. With images, these are the stages
    with the embedding or with a layer that image features are added to."""
    first, *_ = pipeline_layers(shape.num_layers, cfg.dims)[stage]
    return cfg.data.image_column is not None and first.start < max(1, num_deepstack_layers(cfg))


def trained_vision(cfg: Config, shape: ModelShape) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of the tower's weights, if trained; ValueError if it cannot be trained."""
    if cfg.model.freeze_vision:
        return ()
    kind = read_json(cfg.model.path / "config.json").get("model_type")
    if kind not in WITH_IMAGES:
        raise ValueError(
            f"model.freeze_vision false: model.path is a {kind}, and vision towers can be trained "
            f"for {', '.join(WITH_IMAGES)} only: leave it out"
        )
    first, *_ = pipeline_layers(shape.num_layers, cfg.dims)[0]
    num_layers = num_deepstack_layers(cfg)
    at_least = num_layers * cfg.dims.virtual_pipeline
    if len(first) < num_layers:
        raise ValueError(
            f"model.freeze_vision false needs the {num_layers} layers with image features in the "
            f"pipeline's first stage or chunk, which has {counted(len(first), 'layer')}: set a "
            "smaller parallel.pipeline_parallel_size, or "
            f"parallel.num_layers_in_first_pipeline_stage to {at_least} or more, or leave it out"
        )
    return vision_tensors(cfg.model.path)
