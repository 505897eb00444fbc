"""Rows of quantisation-aware training, against straight-through gradients in float64."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.model import quantized_model
from helpers.models.conversions import weights_of
from helpers.oracle import adapters
from helpers.oracle.policies import Numbers, OracleCase, load_oracle, numbers_of
from helpers.oracle.rows import Kind, Row, Worlds
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.optimizer import apply_gradient
from megatron_grpo.policy.quantized import QuantizedPolicy
from parallel.groups import Groups


def is_quantized(name: str) -> bool:
    return "_proj" in name and name.endswith(".weight")


def rounded_block(values: Tensor) -> Tensor:
    return rounded(values.reshape(1, -1), "fp8_channel").view_as(values)


def rounded(weight: Tensor, scheme: str) -> Tensor:
    """Quantise each row (`int8`, `fp8_channel`) or 128 x 128 block (`fp8`), and dequantise it."""
    if scheme == "fp8":
        parts = [rows.split(128, dim=1) for rows in weight.split(128)]
        return torch.cat([torch.cat([*map(rounded_block, row)], dim=1) for row in parts])
    largest = weight.abs().amax(1, keepdim=True)
    if scheme == "int8":
        return (weight / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)
    return (weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)


def rounded_copy(folder: Path, scheme: str) -> Path:
    out = folder.with_name(f"{folder.name} {scheme}")
    if not out.exists():
        shutil.copytree(folder, out)
        weights = {
            name: rounded(values, scheme) if is_quantized(name) else values
            for name, values in weights_of(folder).items()
        }
        save_file(weights, out / "model.safetensors")
    return out


def largest_positive(folder: Path) -> Path:
    """Make the largest weight of each row positive: see `modelopt_model`."""
    weights = weights_of(folder)
    for name in filter(is_quantized, weights):
        largest = weights[name].gather(1, weights[name].abs().argmax(1, keepdim=True))
        weights[name] *= largest.sign()
    save_file(weights, folder / "model.safetensors")
    return folder


def aware_policy(scheme: str, cfg: Config, groups: Groups) -> QuantizedPolicy:
    model = quantized_model(scheme, read_shape(cfg.model.path), "F32")
    assert model is not None
    plain = build_policy(cfg, trained_shape(cfg), groups)
    return QuantizedPolicy(**vars(plain), quantized=model, groups=groups)


class Quantized(Kind):
    """Gradients are straight-through: those of the model with rounded weights.

    Tensor ranks split rows and blocks, and must agree on each scale.
    """

    overrides = ("optimizer.lr_warmup_steps=0",)

    def __init__(self, scheme: str) -> None:
        self.name = self.scheme = scheme

    def policy(self, cfg: Config, groups: Groups) -> QuantizedPolicy:
        return aware_policy(self.scheme, cfg, groups)

    def found(self, row: Row, folder: Path, groups: Groups) -> Numbers:
        cfg = self.config(row, folder, groups.dims)
        return trained(self.policy(cfg, groups), groups, self.pack(cfg, groups))

    def oracle(self, folder: Path) -> OracleCase:
        return OracleCase.of(rounded_copy(folder, self.scheme))

    def check(self, row: Row, worlds: Worlds, ranks: Sequence[Any]) -> None:
        plain = worlds.oracle(Row(row.model, "")).logprobs
        apart = (a - b for a, b in zip(plain, worlds.oracle(row).logprobs, strict=True))
        assert max(each.abs().max() for each in apart) > 1e-3
        super().check(row, worlds, ranks)


def trained(policy: QuantizedPolicy, groups: Groups, share: Sequence[Any]) -> Numbers:
    """Numbers of the policy; checks that its weights stay exact, and then takes a step."""
    before = {name: values.detach().clone() for name, values in policy.parameters().items()}
    found = numbers_of(policy, groups, share)
    for name, values in policy.parameters().items():
        assert torch.equal(values, before[name]), f"{name} is left rounded"
    apply_gradient(policy.optimizer, found[2])
    for name, values in policy.parameters().items():  # a step of Adam is as long as lr
        if values.requires_grad:
            assert 0 < (values - before[name]).abs().max() < 1.01e-3, name
    return found


class QuantizedAdapted(adapters.Adapted):
    """The sum of weights and adapters is quantised; the reference is neither quantised nor adapted.

    Some layers have no adapter.
    """

    overrides = ("optimizer.lr_warmup_steps=0",)

    def __init__(self, scheme: str) -> None:
        self.name, self.scheme = f"lora, {scheme}", scheme

    def policy(self, cfg: Config, groups: Groups) -> QuantizedPolicy:
        return aware_policy(self.scheme, cfg, groups)

    def answer(
        self, row: Row, worlds: Worlds, values: dict[str, Tensor], served: dict[str, Tensor]
    ) -> adapters.Answer:
        adapted = {n.removeprefix("base_model.model.").replace(".lora_A", "") for n in values}
        numbers = {n: rounded(each, self.scheme) for n, each in served.items() if n in adapted}
        folder = worlds.folder(row.model)
        copy = rounded_copy(folder, self.scheme)
        logprobs, _, gradients, _ = adapters.oracle(copy, values, adapters.SCALE, numbers)
        _, plain, _, merged = adapters.oracle(folder, values, adapters.SCALE)
        return logprobs, plain, gradients, merged


def modelopt_model(folder: Path, scheme: str) -> Any:
    """The model with ModelOpt's weight quantizers in its linear layers.

    ModelOpt multiplies by the inverse of a scale, which may round a half-way weight to the other
    side. In INT8 the largest weight of a row is half-way (127.5); where it is positive, both clamp
    it to 127.
    """
    quantization = pytest.importorskip("modelopt.torch.quantization")
    how: dict[str, Any] = {"num_bits": (4, 3), "axis": 0}
    if scheme == "int8":
        how = {"num_bits": 8, "narrow_range": False, "axis": 0}
    if scheme == "fp8":
        how = {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*_proj.weight_quantizer", "cfg": how},
        ],
        "algorithm": "max",
    }
    model = quantization.quantize(load_oracle(folder), config, lambda model: None)
    if scheme == "int8":  # ModelOpt scales the largest weight to 127, compressed-tensors to 127.5
        for name, module in model.named_modules():
            if name.endswith("_proj.weight_quantizer"):
                module.amax = module.amax * (127 / 127.5)
    return model
