"""Quantised copies of a folder, and their dequantised copies by other libraries.

Scales are random, since only the arithmetic of reading is tested.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.model import quantized_model
from checkpoint_convert.quantized.numbers import dequantized
from checkpoint_convert.quantized.shard import quantized_tensors
from helpers.models.conversions import weights_of, with_weights

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """A published format, its config and the dtype of its weights and scales."""

    config: dict[str, Any]
    stored: torch.dtype
    kind: str
    """tensor, channel or block"""
    block: tuple[int, int] = (1, 1)
    suffix: str = "_scale"
    scales: torch.dtype = torch.float32
    activations: str = ""
    """Name of the activations' scale next to each weight; "" if there is none."""
    in_own_file: bool = False
    """Whether the config is in ModelOpt's own file instead of config.json."""


def compressed(form: str, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    args = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": args}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# No extent of the tiny models divides by 24 or 40, and their tensor ranks cut inside such blocks.
BLOCK = (24, 40)
FORMATS = {
    "DeepSeek": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]},
        *(E4M3, "block", BLOCK, "_scale_inv"),
    ),
    "FP8 per tensor": Format(
        compressed("float-quantized", "float", "tensor"), E4M3, "tensor", scales=torch.bfloat16
    ),
    "FP8 per channel": Format(compressed("float-quantized", "float", "channel"), E4M3, "channel"),
    "FP8 in blocks": Format(
        compressed("float-quantized", "float", "block", block_structure=[*BLOCK]),
        *(E4M3, "block", BLOCK),
    ),
    "INT8 per channel": Format(
        compressed("int-quantized", "int", "channel"), torch.int8, "channel", scales=torch.bfloat16
    ),
    "ModelOpt FP8": Format(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        *(E4M3, "tensor"),
        activations="input_scale",
        in_own_file=True,
    ),
    "FP8 of Mistral": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        *(E4M3, "tensor", (1, 1), "_scale_inv", torch.bfloat16, "activation_scale"),
    ),
}


def quantized_copy(model: Path, folder: Path, form: Format, dtype: str = "bfloat16") -> Path:
    """Copy `model` with all matrices of its layers quantised as `form`, except routers."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, value in weights_of(model).items():
        weights[name] = value.to(getattr(torch, dtype))
        if is_quantized(name, value):
            scales = random_scales(value, form, generator)
            steps = value / spread(scales, tuple(value.shape), form.block)
            steps = steps.round().clamp(-128, 127) if form.stored == torch.int8 else steps
            weights[name] = steps.to(form.stored)
            weights[name + form.suffix] = scales
            if form.activations:
                weights[name.removesuffix("weight") + form.activations] = torch.tensor(0.1)
    config = {} if form.in_own_file else {"quantization_config": form.config}
    with_weights(model, folder, weights, dtype=dtype, **config)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    if form.in_own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.config), encoding="utf-8")
    return folder


def is_quantized(name: str, value: Tensor) -> bool:
    """Whether published folders quantise this tensor."""
    is_router = name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    return value.dim() == 2 and ".layers." in name and not is_router


def random_scales(value: Tensor, form: Format, generator: torch.Generator) -> Tensor:
    """Scales near 1/100, so that weights of tiny models use many of the 256 codes."""
    rows, columns = value.shape
    sizes = {
        "tensor": (),
        "channel": (rows, 1),
        "block": (-(-rows // form.block[0]), -(-columns // form.block[1])),
    }
    scales = 0.005 + 0.01 * torch.rand(sizes[form.kind], generator=generator)
    return scales.to(form.scales)


def spread(scales: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """The scale of every element, s[i // rows, j // columns] in DeepSeek's inference/kernel.py."""
    if scales.dim() < 2:
        return scales.float()
    if scales.shape[1] == 1 and block == (1, 1):
        return scales.float()
    rows = torch.arange(shape[0]) // block[0]
    columns = torch.arange(shape[1]) // block[1]
    return scales.float()[rows][:, columns]


def rounded_copy(model: Path, folder: Path, scheme: str, ignore: Sequence[str] = ()) -> Path:
    """Copy `model` with its weights quantised as a run does and dequantised again."""
    how = quantized_model(scheme, read_shape(model), "BF16", ignore)
    assert how is not None
    weights = dict(quantized_tensors(model, scheme, ignore))
    for name, size in how.matrices.items():
        scales = weights.pop(how.scale_name(name))
        product = dequantized(weights[name], scales, how.scheme.block_in(size), (0, 0))
        weights[name] = product.bfloat16()
    return with_weights(model, folder, weights)


def dequantized_copy(folder: Path, out: Path, form: Format, dtype: str = "bfloat16") -> Path:
    """Dequantise a copy by compressed-tensors' `dequantize`.

    It takes no partial blocks: blocks follow DeepSeek's weight_dequant.
    """
    weights = weights_of(folder)
    for name in [name for name, value in weights.items() if value.dtype == form.stored]:
        values, scales = weights[name], weights.pop(name + form.suffix)
        if form.kind == "block":
            product = values.float() * spread(scales, tuple(values.shape), form.block)
        else:
            product = dequantize(values, scales)
        weights[name] = product.to(getattr(torch, dtype))
        weights.pop(name.removesuffix("weight") + form.activations, None)
    with_weights(folder, out, weights, quantization_config=None)
    (out / "hf_quant_config.json").unlink(missing_ok=True)
    return out


NVFP4 = preset_name_to_scheme("NVFP4A16", ["Linear"])


def nvfp4(weights: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Tensors that compressed-tensors stores for each of several weights with one global scale."""
    largest = torch.stack([each.float().abs().amax() for each in weights]).amax()
    whole = generate_gparam(-largest, largest)
    found = []
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors compiles its rounding
        for weight in weights:
            blocks = weight.float().unflatten(1, (-1, 16))
            ends = blocks.amin(-1), blocks.amax(-1)
            scales, _ = calculate_qparams(*ends, NVFP4.weights, global_scale=whole)
            state = {"weight": weight.float(), "weight_scale": scales}
            found.append(
                NVFP4PackedCompressor.compress(
                    state | {"weight_global_scale": whole.clone()}, NVFP4
                )
            )
    return found


def from_nvfp4(stored: dict[str, Tensor]) -> Tensor:
    """The bfloat16 weight that compressed-tensors decompresses."""
    return NVFP4PackedCompressor.decompress(stored, NVFP4)["weight"]


FUSED = (("q", "k", "v"), ("gate", "up"), ("q_a", "kv_a"))
"""Projections that engines fuse into one matrix, with one global scale."""


def nvfp4_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a model, with linear layers in compressed-tensors' NVFP4."""
    found, together = {}, defaultdict(list)
    for name, value in weights.items():
        if not is_quantized(name, value):
            found[name] = value
            continue
        *outer, own, _ = name.split(".")
        first = [group[0] for group in FUSED if own.split("_proj")[0] in group]
        together[".".join([*outer, *(first or [own])])].append(name)
    for names in together.values():
        for name, stored in zip(names, nvfp4([weights[n] for n in names]), strict=True):
            prefix = name.removesuffix("weight")
            found |= {prefix + own: value for own, value in stored.items()}
    return found


def nvfp4_copies(model: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """By form, a copy of the model in NVFP4 and its dequantised copy, both in bfloat16.

    compressed-tensors' form is dequantised by compressed-tensors, ModelOpt's as
    number * (scale * scale_2).
    """
    plain = {name: value.bfloat16() for name, value in weights_of(model).items()}
    stored, read, renamed, product = nvfp4_weights(plain), {**plain}, {**plain}, {**plain}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name, value in plain.items() if is_quantized(name, value)]:
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        tensors = {part: stored[name.removesuffix("weight") + part] for part in parts}
        read[name] = from_nvfp4(tensors)
        numbers, scales, whole = tensors.values()
        renamed |= {name: numbers, f"{name}_scale": scales, f"{name}_scale_2": 1 / whole[0]}
        renamed[name.replace("weight", "input_scale")] = torch.tensor(0.1)
        codes = torch.stack([numbers % 16, numbers // 16], -1).flatten(1).int()
        signed = torch.where(codes >= 8, -table[codes % 8], table[codes % 8])
        both = scales.float() * (1 / whole[0])
        product[name] = (signed * both.repeat_interleave(16, 1)).bfloat16()
    how = quantized_model("nvfp4", read_shape(model), "BF16")
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    forms = {
        "NVFP4": (stored, how.config, read),
        "NVFP4 of ModelOpt": (renamed, modelopt, product),
    }
    return {
        form: (
            with_weights(
                model, folder / form, weights, dtype="bfloat16", quantization_config=config
            ),
            with_weights(model, folder / f"_{form}", values, dtype="bfloat16"),
        )
        for form, (weights, config, values) in forms.items()
    }
