"""Floor 1: model families as layouts; reads and writes Hugging Face and Megatron weight files.

The names exported here do not need torch. The modules that move a rank's tensors are
`checkpoint_convert.weights` and `checkpoint_convert.hf_export`.
"""

from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_folder import check_weights
from checkpoint_convert.megatron import hf_tensors, megatron_layout
from checkpoint_convert.shape import (
    LatentShape,
    ModelShape,
    MoeShape,
    check_divisible,
    padded_vocab_size,
)

__all__ = [
    "LatentShape",
    "ModelShape",
    "MoeShape",
    "check_divisible",
    "check_weights",
    "hf_tensors",
    "megatron_layout",
    "padded_vocab_size",
    "read_shape",
]
