"""Parts of a model that are trained: its layer for multi-token prediction, its vision tower."""

from dataclasses import replace

from checkpoint_convert import ModelShape, read_shape
from checkpoint_convert.folder import read_json
from checkpoint_convert.formats.safetensors_file import stored_names
from checkpoint_convert.text_tower import text_config
from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import parts_moved
from megatron_grpo.config.section import refuse_beside
from megatron_grpo.config.vision import trained_vision


def trained_shape(cfg: Config) -> ModelShape:
    """The shape of the model in `cfg.model.path`: `trains_mtp` says whether its layer for
    multi-token prediction is a part, and `vision` whether its vision tower is.

    Raises ValueError if they cannot be trained.
    """
    shape = read_shape(cfg.model.path)
    vision, trains_mtp = trained_vision(cfg, shape), _trains_mtp(cfg, shape)
    return replace(shape, vision=vision, trains_mtp=trains_mtp)


def _trains_mtp(cfg: Config, shape: ModelShape) -> bool:
    """Raises ValueError if the model has no such layer, or one with its own embedding, and for what
    does not know one."""
    if not cfg.model.mtp_num_layers:
        return False
    if not shape.can_train_mtp:
        found = "sparse attention" if shape.indexer else f"{shape.num_mtp_layers} of them"
        raise ValueError(
            "model.mtp_num_layers 1 trains the only layer for multi-token prediction of a "
            f"DeepSeek-V3, GLM-4.5, Qwen3-Next or Qwen3.5, and model.path has {found}: set 0"
        )
    config = cfg.model.path / "config.json"
    is_told = text_config(config, read_json(config)).get("mtp_use_dedicated_embeddings")
    if is_told or "mtp.embed_tokens.weight" in stored_names(cfg.model.path):
        raise ValueError(
            "model.mtp_num_layers 1: the layer in model.path has an embedding of its own "
            "(mtp_use_dedicated_embeddings, mtp.embed_tokens.weight), which is not supported: set 0"
        )
    megatron = cfg.model.megatron
    others = {
        "lora.r": cfg.lora.r,
        "grpo.shared_prompts": cfg.grpo.shared_prompts,
        "train.offload": parts_moved(cfg.train.offload),
        "train.export_quantization": cfg.train.export_quantization != "none",
        "rollout.quantization": cfg.rollout.quantization != "none",
        "optimizer.optimizer_cpu_offload": cfg.optimizer.optimizer_cpu_offload,
        **{
            f"model.megatron.{name}": megatron.get(name)
            for name in (
                "fp8",
                "fine_grained_activation_offloading",
                "moe_aux_loss_coeff",
                "moe_z_loss_coeff",
            )
        },
    }
    instead = "leave it out, or set model.mtp_num_layers=0"
    refuse_beside("the layer for multi-token prediction", others, instead)
    return True
