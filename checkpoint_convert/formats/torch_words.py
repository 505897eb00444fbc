"""Torch tensors as words. See `values`."""

import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import TORCH_NAMES
from checkpoint_convert.formats.values import WORDS, Words

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""The supported weight dtypes, by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def words_of(tensor: Tensor) -> Words:
    """The words of a tensor on the CPU, in the same memory."""
    integers = tensor.detach().view(_INTEGERS[tensor.itemsize])
    return integers.numpy().view(WORDS[DTYPE_NAMES[tensor.dtype]])
