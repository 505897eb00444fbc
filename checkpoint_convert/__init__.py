"""Floor 1: model families as layouts; weights in Hugging Face and Megatron files, in and out.

Here is what needs no torch. What moves the tensors of a rank is `checkpoint_convert.rank_weights`
and `checkpoint_convert.hf_export`.
"""

from checkpoint_convert.formats.hf_folder import check_weights
from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.megatron import hf_tensors, megatron_layout
from checkpoint_convert.shape import ModelShape, MoeShape, check_divisible, padded_vocab_size

__all__ = [
    "ModelShape",
    "MoeShape",
    "check_divisible",
    "check_weights",
    "hf_tensors",
    "megatron_layout",
    "padded_vocab_size",
    "read_shape",
]
