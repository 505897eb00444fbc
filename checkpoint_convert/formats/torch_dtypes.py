"""The supported dtypes of weights in torch."""

import torch

from checkpoint_convert.formats.safetensors_file import QUANTIZED_TORCH_NAMES, TORCH_NAMES

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""torch's dtypes by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
STORED_DTYPES: dict[str, torch.dtype] = DTYPES | {
    name: getattr(torch, torch_name) for name, torch_name in QUANTIZED_TORCH_NAMES.items()
}
"""`DTYPES` and the dtypes of quantised weights."""
