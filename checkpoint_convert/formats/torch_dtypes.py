"""The supported dtypes of weights in torch."""

import torch

from checkpoint_convert.formats.safetensors_file import TORCH_NAMES

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""By their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
