"""What the vision tower takes where it is loaded, if prompts have images."""

from functools import cache
from pathlib import Path

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.policy.vision_config import has_tower


def tower_bytes(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of its weights on a rank of a pipeline stage."""
    if not has_tower(cfg, shape, stage):
        return 0
    return _num_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]


def engine_tower_bytes(cfg: Config) -> int:
    """Bytes of its weights on each worker of an engine, which all have an equal part of it.

    Left out: biases, norms and the embeddings of patches, some megabytes, are whole on each.
    """
    if cfg.data.image_column is None:
        return 0
    whole = _num_weights(cfg.model.path) * ITEMSIZE[cfg.model.dtype]
    return whole // cfg.rollout.tensor_parallel_size


@cache
def _num_weights(folder: Path) -> int:
    # They take seconds to import, and only plans of runs with images need them.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    with torch.device("meta"):
        tower = AutoModel.from_config(AutoConfig.from_pretrained(folder).vision_config)
    return sum(weight.numel() for weight in tower.parameters())
