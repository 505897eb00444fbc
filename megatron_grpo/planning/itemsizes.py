"""Bytes per element of tensors: those of a mixture's routers may be float32 in any model."""

from checkpoint_convert import ModelShape
from checkpoint_convert.megatron import hf_dtypes
from megatron_grpo.config.config import Config
from megatron_grpo.weights.worker_layouts import worker_dtypes

ITEMSIZE = {"bfloat16": 2, "float32": 4}


def file_itemsizes(cfg: Config, shape: ModelShape) -> dict[str, int]:
    """Of each tensor of the weight files, by its name."""
    dtypes = hf_dtypes(shape, cfg.model.dtype, "float32")
    return {name: ITEMSIZE[dtype] for name, dtype in dtypes.items()}


def worker_itemsizes(cfg: Config, shape: ModelShape) -> dict[str, int]:
    """Of each parameter of an engine's workers, by its name in `worker_layouts`."""
    dtypes = worker_dtypes(shape, cfg.rollout, cfg.model.dtype)
    return {name: ITEMSIZE[dtype] for name, dtype in dtypes.items()}
