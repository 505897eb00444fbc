"""Torch tensors as raw bits. See `values`."""

import numpy as np
import torch
from torch import Tensor

from checkpoint_convert.formats.safetensors_file import TORCH_NAMES
from checkpoint_convert.formats.values import BIT_DTYPES, RawBits

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""The supported weight dtypes, by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_view(tensor: Tensor) -> RawBits:
    """The raw bits of a tensor on the CPU, as a view of its memory."""
    integers = tensor.detach().view(_INTEGERS[tensor.itemsize])
    # Tensor.numpy() would keep the storage from being freed in place for good: `train.offload`.
    return np.from_dlpack(integers).view(BIT_DTYPES[DTYPE_NAMES[tensor.dtype]])
