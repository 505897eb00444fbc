"""Folders of gpt-oss in MXFP4, as OpenAI publishes it."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.models.conversions import weights_of, with_weights

STACKS = ("gate_up_proj", "down_proj")


def mxfp4_copies(
    model: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object] = lambda weights: None
) -> tuple[Path, Path]:
    """Two copies of the model: random MXFP4 experts, and transformers' bfloat16 values of them."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: each.bfloat16() for name, each in weights_of(model).items()}
    plain = dict(weights)
    for name in [name for name in weights if name.endswith(STACKS)]:
        experts, inputs, outputs = weights.pop(name).shape
        sizes = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 130, sizes, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    edit(weights)
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = {"quantization_config": table, "dtype": "bfloat16"}
    return (
        with_weights(model, folder / "quantized", weights, **config),
        with_weights(model, folder / "plain", plain),
    )
