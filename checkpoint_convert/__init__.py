"""Floor 1: model families as layouts; Hugging Face weight folders in and out."""

from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_export import create_export, finish_export, write_weights
from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.hf_read import read_weights
from checkpoint_convert.megatron import check_megatron_layouts, hf_tensors, megatron_layout
from checkpoint_convert.shape import ModelShape, check_divisible, padded_vocab_size

__all__ = [
    "ModelShape",
    "check_divisible",
    "check_megatron_layouts",
    "check_weights",
    "create_export",
    "finish_export",
    "hf_tensors",
    "megatron_layout",
    "padded_vocab_size",
    "read_shape",
    "read_weights",
    "write_weights",
]
