"""Optional trained parts of a model: the layer for multi-token prediction, the vision tower."""

from dataclasses import replace

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.folder import read_json
from checkpoint_convert.formats.safetensors_file import stored_names
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.vision import trained_vision


def trained_shape(cfg: Config) -> ModelShape:
    """Read the shape of the model in `cfg.model.path`.

    `trains_mtp` and `vision` say whether its layer for multi-token prediction and its vision tower
    are trained. Raises ValueError if they cannot be.
    """
    shape = read_shape(cfg.model.path)
    vision, trains_mtp = trained_vision(cfg, shape), _trains_mtp(cfg, shape)
    return replace(shape, vision=vision, trains_mtp=trains_mtp)


def _trains_mtp(cfg: Config, shape: ModelShape) -> bool:
    """Whether the layer for multi-token prediction is trained. Raises ValueError for a model
    without such a layer, and for a layer with its own embedding."""
    if not cfg.model.mtp_num_layers:
        return False
    if not shape.can_train_mtp:
        found = "sparse attention" if shape.indexer else f"{shape.num_mtp_layers} of them"
        raise ValueError(
            "model.mtp_num_layers 1 trains the only layer for multi-token prediction of a "
            f"DeepSeek-V3, GLM-4.5, Qwen3-Next or Qwen3.5, and model.path has {found}: set 0"
        )
    config = cfg.model.path / "config.json"
    is_dedicated = text_config(config, read_json(config)).get("mtp_use_dedicated_embeddings")
    if is_dedicated or "mtp.embed_tokens.weight" in stored_names(cfg.model.path):
        raise ValueError(
            "model.mtp_num_layers 1: the layer in model.path has an embedding of its own "
            "(mtp_use_dedicated_embeddings, mtp.embed_tokens.weight), which is not supported: set 0"
        )
    return True
