"""What a vision tower that is not trained takes where it is loaded, if prompts have images."""

from math import prod
from pathlib import Path

from checkpoint_convert import ModelShape
from checkpoint_convert.families.vision import vision_tensors
from megatron_grpo.config.config import Config
from megatron_grpo.config.vision import has_tower
from megatron_grpo.planning.card import ITEMSIZE


def tower_bytes(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of its weights on a rank of a pipeline stage."""
    if shape.vision or not has_tower(cfg, shape, stage):
        return 0
    return _num_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]


def engine_tower_bytes(cfg: Config) -> int:
    """Bytes of its weights on each worker of an engine, which all have an equal part of it.

    Left out: biases, norms and the embeddings of patches, some megabytes, are whole on each.
    """
    if cfg.data.image_column is None or not cfg.model.freeze_vision:
        return 0
    whole = _num_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]
    return whole // cfg.rollout.tensor_parallel_size


def _num_weights(folder: Path) -> int:
    return sum(prod(size) for _, size in vision_tensors(folder))
