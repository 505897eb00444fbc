"""Floor 1: model families as layouts; weights in Hugging Face and Megatron files, in and out."""

from checkpoint_convert.assembly import read_weights
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_export import create_export, finish_export, write_weights
from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.megatron import check_megatron_layouts, hf_tensors, megatron_layout
from checkpoint_convert.shape import ModelShape, MoeShape, check_divisible, padded_vocab_size
from checkpoint_convert.weights import open_weights

__all__ = [
    "ModelShape",
    "MoeShape",
    "check_divisible",
    "check_megatron_layouts",
    "check_weights",
    "create_export",
    "finish_export",
    "hf_tensors",
    "megatron_layout",
    "open_weights",
    "padded_vocab_size",
    "read_shape",
    "read_weights",
    "write_weights",
]
